"""Measure how fast topics grow, from samples of their next offsets."""

import time
from collections import deque

from penstock.topics.store import TopicStore

KEPT_SAMPLES = 60
MIN_SAMPLE_SECONDS = 0.5  # between two samples


class TopicRates:
    def __init__(self, topics: TopicStore) -> None:
        self._topics = topics
        self._at: float | None = None  # time of the last sample
        self._offsets: dict[str, int] = {}  # next offsets in the last sample
        self._rates: dict[str, deque[float]] = {}  # records per second, the newest last

    def sample(self) -> None:
        """Sample the next offset of every topic."""
        at = time.monotonic()
        if self._at is not None and at - self._at < MIN_SAMPLE_SECONDS:
            return
        offsets = {
            name: topic.next_offset
            for name in self._topics.names()
            if (topic := self._topics.get(name)) is not None
        }
        if self._at is not None:
            seconds = at - self._at
            for name, offset in offsets.items():
                before = self._offsets.get(name, offset)
                rates = self._rates.setdefault(name, deque(maxlen=KEPT_SAMPLES))
                rates.append(max(0, offset - before) / seconds)
        for name in self._rates.keys() - offsets.keys():
            del self._rates[name]
        self._at, self._offsets = at, offsets

    def rate(self, topic: str) -> float | None:
        """Return records per second; None after a single sample."""
        rates = self._rates.get(topic)
        return rates[-1] if rates else None

    def recent(self, topic: str) -> list[float]:
        return list(self._rates.get(topic, ()))
