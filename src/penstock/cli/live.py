"""The broker's live figures: the stream that the Console reads, reopened when it ends."""

from collections.abc import Iterator
from typing import Any

from penstock.cli import BrokerApi
from penstock.errors import PenstockError, Unavailable
from penstock.net.broker_caller import BrokerCaller

LIVE = "/api/v1/live"
SILENCE_SECONDS = 15.0  # without an event, which comes about once a second
RATE_SECONDS = 0.9  # shortest interval for a rate


class LiveFigures:
    """The merged events of `GET /api/v1/live`."""

    def __init__(self, api: BrokerApi) -> None:
        self._api = api
        self._caller: BrokerCaller | None = None
        self._events: Iterator[Any] = iter(())
        self._now: dict[str, Any] = {}

    def take(self, seconds: float = RATE_SECONDS) -> dict[str, Any]:
        """Follow the broker's figures for `seconds`, and return the last ones."""
        try:
            if self._caller is None:
                self._caller = self._api.caller(SILENCE_SECONDS)
                self._events = self._caller.events(LIVE)
            began: float | None = None
            for event in self._events:
                event.pop("history", None)
                if "last" in event:
                    event["sample"] = event.pop("last")
                self._now |= event
                began = event["at"] if began is None else began
                if event["at"] - began >= 1000 * seconds:
                    return dict(self._now)
            raise Unavailable(f"the broker at {self._api.url} ended the stream of its figures")
        except PenstockError:
            self.close()
            raise

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
            self._caller = None


def figures_of(api: BrokerApi) -> dict[str, Any]:
    """Return the figures now."""
    figures = LiveFigures(api)
    try:
        return figures.take()
    finally:
        figures.close()
