"""Acknowledgements and the renewal of leases, in a thread with a connection of its own.

The thread exists because a task may run in the thread that consumes (the solo pool, a callback of
kombu): its lease is renewed nevertheless, and its early acknowledgement is sent before it runs.
Acknowledgements that arrive while a request is under way go together in the next one. While no
broker answers they are kept, so a task that ends during a restart of the broker is not run twice.
Under gevent the thread is a greenlet. A forked child has no copy of the thread, and needs none:
leases belong to the process that took them.
"""

import atexit
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.client.blocking import BlockingBrokers, Line
from penstock.client.brokers import understood
from penstock.client.messages import Popped, Received
from penstock.errors import Unavailable
from penstock.net.http import HttpAnswer
from penstock.protocol.queue_options import LARGEST

log = logging.getLogger("penstock.client")

MAX_ACKS = 1000  # in one request
PAUSE_SECONDS = 0.5  # between attempts while no broker answers
ASSUMED_LEASE_SECONDS = 60.0  # lease time if the broker does not name it
Outcome = tuple[Received, str, str | None]  # message, status and reason
_popped = msgspec.json.Decoder(Popped[Received])


@dataclass(slots=True)
class KeptLease:
    seconds: float
    due: float  # when to renew it
    open: set[Received] = field(default_factory=set)  # its messages without an outcome


class Settler:
    """Sends the outcomes of messages, and renews their leases until then."""

    def __init__(self, brokers: BlockingBrokers) -> None:
        self._line = Line(brokers)
        self._changed = threading.Condition()
        self._outcomes: deque[Outcome] = deque()  # not sent yet
        self._sending = 0  # outcomes in the request that is under way
        self._stuck = False  # no broker answers
        self._leases: dict[str, KeptLease] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def take(self, answer: HttpAnswer) -> Popped[Received]:
        """Return what the answer to a pop brought. The leases of its messages are renewed until
        they are settled.
        """
        if not answer.body:
            return Popped()
        popped = understood(_popped.decode, answer.body)
        seconds = float(answer.headers.get("lease-time") or 0) or ASSUMED_LEASE_SECONDS
        with self._changed:
            for message in popped.messages:
                message.queue = message.queue or popped.queue
                if message.lease_id:
                    self._keep(message, seconds)
        return popped

    def _keep(self, message: Received, seconds: float) -> None:
        lease = self._leases.get(message.lease_id)
        if lease is None:
            lease = KeptLease(seconds, time.monotonic() + seconds / 3)
            self._leases[message.lease_id] = lease
        lease.open.add(message)
        self._run()

    def settle(self, message: Received, status: str, error: str | None = None) -> None:
        """Send the message's outcome soon: completed, retry, failed or dlq."""
        if self._pid != os.getpid():
            return  # a forked child: the parent holds the lease
        with self._changed:
            self._outcomes.append((message, status, error))
            self._run()
            self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until the outcomes are at a broker, for at most `timeout` seconds."""
        if self._pid == os.getpid():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stuck or not (self._outcomes or self._sending), timeout
                )

    def close(self, timeout: float) -> None:
        """Send what is settled, for at most `timeout` seconds, and end the thread."""
        if self._pid != os.getpid() or self._thread is None:
            return
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        with self._changed:
            lost = len(self._outcomes) + self._sending
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self._close_at_exit)
        self._thread.join(max(0.1, deadline - time.monotonic()))
        if lost:
            log.warning(
                "%d acknowledgements were not sent: their messages will be delivered again", lost
            )

    def _close_at_exit(self) -> None:
        self.close(1.0)

    def _run(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._work, name="penstock acknowledgements", daemon=True
            )
            self._thread.start()
            atexit.register(self._close_at_exit)
        elif self._thread is not None:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._outcomes, self._pause())
                if self._closed and not self._outcomes:
                    break
                outcomes = self._take_outcomes()
                due = [] if self._closed else self._take_due()
            try:
                if outcomes:
                    self._send(outcomes)
                    outcomes = []
                for lease, seconds in due:
                    self._renew(lease, seconds)
            except Unavailable as error:
                log.warning("acknowledgements wait for a broker: %s", error)
                with self._changed:
                    self._outcomes.extendleft(reversed(outcomes))
                    for name, _ in due:
                        if name in self._leases:
                            self._leases[name].due = 0.0  # renew it as soon as a broker answers
                    self._sending, self._stuck = 0, True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, PAUSE_SECONDS)
                    if self._closed:
                        break
            except Exception:  # refused, or a bug, which must not stop the thread for good
                log.exception("acknowledgements or renewals failed")
            else:
                self._stuck = False
            finally:
                with self._changed:
                    self._sending = 0
                    self._changed.notify_all()
        self._line.close()

    def _pause(self) -> float | None:
        """Return the seconds until the next renewal of a lease."""
        if not self._leases:
            return None
        return max(0.0, min(lease.due for lease in self._leases.values()) - time.monotonic())

    def _take_outcomes(self) -> list[Outcome]:
        """Return the next outcomes, all of one group."""
        outcomes: list[Outcome] = []
        group = self._outcomes[0][0].consumer_group if self._outcomes else ""
        while (
            self._outcomes
            and len(outcomes) < MAX_ACKS
            and self._outcomes[0][0].consumer_group == group
        ):
            outcomes.append(self._outcomes.popleft())
        self._sending = len(outcomes)
        for message, _, _ in outcomes:
            lease = self._leases.get(message.lease_id)
            if lease is not None:
                lease.open.discard(message)
                if not lease.open:
                    del self._leases[message.lease_id]
        return outcomes

    def _take_due(self) -> list[tuple[str, float]]:
        now = time.monotonic()
        due = [(name, lease.seconds) for name, lease in self._leases.items() if lease.due <= now]
        for name, seconds in due:
            self._leases[name].due = now + seconds / 3
        return due

    def _send(self, outcomes: list[Outcome]) -> None:
        items: list[dict[str, Any]] = []
        for message, status, error in outcomes:
            item: dict[str, Any] = {
                "transactionId": message.transaction_id,
                "partitionId": message.partition_id,
                "leaseId": message.lease_id,
                "status": status,
            }
            if status == "failed":  # requeued: delivered again at once, without a limit
                item |= {"delay": 0, "maxAttempts": LARGEST}
            items.append(item if error is None else item | {"error": error})
        body = {"acknowledgments": items, "consumerGroup": outcomes[0][0].consumer_group}
        results = self._line.json("POST", "/api/v1/ack/batch", body=body)
        refused = [result for result in results if not result["success"]]
        if refused:
            log.warning(
                "%d messages will be delivered again, their lease was lost: %s",
                len(refused),
                refused[0].get("error"),
            )

    def _renew(self, lease: str, seconds: float) -> None:
        body = {"seconds": max(1, round(seconds))}
        results = self._line.json("POST", "/api/v1/lease", lease, "extend", body=body)
        if not all(result["success"] for result in results):
            with self._changed:
                lost = self._leases.pop(lease, None)
            if lost is not None and lost.open:
                log.warning("a lease was lost: %d messages will be delivered again", len(lost.open))
