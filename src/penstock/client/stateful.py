"""A consumer with state: the state, the pushes and the acknowledgement are committed together.

    @client.consumer("payments@balances", batch=100, state="v1")
    async def book(payment: Payment, state: State) -> None:
        state["balance"] = state.get("balance", 0) + payment.amount
        state.push("balances", {"balance": state["balance"]})

State belongs to the consumer's address and to a partition. A batch is split by partition; the state
is read, the function is called for each message in order, and one request commits the changes, the
pushes and the acknowledgement. The broker accepts it under the lease of these messages only, so the
state is always the result of the messages that are acknowledged, each counted once.

When the function fails, what it did for the messages before is committed, and the messages behind
go back: they are handled after the one that failed.
"""

import asyncio
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Self, Unpack

import msgspec

from penstock.client import tracing
from penstock.client.brokers import Brokers
from penstock.client.consumer import Consumer, Done, Outcome, P, R
from penstock.client.items import Item, PushOptions, new_item
from penstock.client.messages import Address, Message, Received
from penstock.client.queues import QueueClient
from penstock.contract import operations
from penstock.contract.operation import Operation
from penstock.errors import InvalidRequest, NotFound, PenstockError, TooLarge, Unavailable
from penstock.net.retry import Backoff
from penstock.protocol.payload import encode_payload


class State(MutableMapping[str, Any]):
    """The state of a partition: JSON values by key, as a dict. Reading a value makes a copy of it;
    assign it again after you changed it.
    """

    def __init__(self, values: dict[str, msgspec.Raw]) -> None:
        self._values = values
        self._changes: dict[str, msgspec.Raw | None] = {}  # None: deleted
        self._items: list[Item] = []

    def __getitem__(self, key: str) -> Any:
        return msgspec.json.decode(self._values[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = self._changes[key] = encode_payload(value)

    def __delitem__(self, key: str) -> None:
        del self._values[key]
        self._changes[key] = None

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def push(self, address: str | Address, payload: Any, **options: Unpack[PushOptions]) -> None:
        """Push a message with the state, with the parameters of `Client.push`. Raises
        `InvalidRequest` for a payload that JSON cannot express.
        """
        self._items.append(tracing.created(new_item(address, payload, **options)))

    def copy(self) -> Self:
        """Return the state as it is now."""
        other = type(self)(dict(self._values))
        other._changes, other._items = dict(self._changes), list(self._items)
        return other


class _Query(msgspec.Struct):
    query_id: str


class _Row(msgspec.Struct):
    key: str
    value: msgspec.Raw


class _Rows(msgspec.Struct):
    rows: list[_Row]


class _Done(msgspec.Struct):
    success: bool


# Of Queen MQ's API; the first two change nothing when they are repeated.
_REGISTER = Operation("POST", "/streams/v1/queries", _Query, "Register a query", again=True)
_LOAD = Operation("POST", "/streams/v1/state/get", _Rows, "Read state", again=True)
_COMMIT = Operation("POST", "/streams/v1/cycle", _Done, "Commit state with acknowledgements")


class StateStore:
    """The state of a consumer in the broker."""

    def __init__(self, brokers: Brokers, address: Address, version: str, reset: bool) -> None:
        self._brokers = brokers
        self._address, self._version, self._reset = address, version, reset
        self._query = ""

    async def register(self) -> None:
        """Register this version. Raises `Conflict` if there is state of another one, and
        `InvalidRequest` if the queue has no order.
        """
        where = Address(self._address.queue, None, self._address.group)  # of all its partitions
        body = {
            "name": str(where),
            "source_queue": where.queue,
            "config_hash": self._version,
            "reset": self._reset,
        }
        answer = await self._brokers.call(_REGISTER, body=body)
        self._query, self._reset = answer.query_id, False
        try:
            about = await self._brokers.call(operations.GET_QUEUE_OPTIONS, where.queue)
        except NotFound:
            return
        if about.options.ordering == "none":
            raise InvalidRequest(
                f"{where.queue} has no order, which a consumer with state needs: push with "
                f"partition=, or configure({where.queue!r}, ordering='partition') before"
            )

    async def load(self, message: Received) -> State:
        """Read the state of the message's partition."""
        body = {"query_id": self._query, "partition_id": message.partition_id}
        answer = await self._brokers.call(_LOAD, body=body)
        return State({row.key: msgspec.Raw(bytes(row.value)) for row in answer.rows})

    async def commit(self, messages: Sequence[Received], state: State, *, release: bool) -> None:
        """Commit the state with the acknowledgement of these messages of one partition, and end
        their lease if `release`.
        """
        last = messages[-1]
        operations = [
            {"type": "delete", "key": key}
            if value is None
            else {"type": "upsert", "key": key, "value": value}
            for key, value in state._changes.items()
        ]
        body = {
            "query_id": self._query,
            "partition_id": last.partition_id,
            "consumer_group": last.consumer_group,
            "config_hash": self._version,
            "release_lease": release,
            "state_ops": operations,
            "push_items": state._items,
            "ack": {"transactionId": last.transaction_id, "leaseId": last.lease_id},
        }
        await self._brokers.call(_COMMIT, body=body)


class StatefulConsumer(Consumer[P, R]):
    """A consumer whose function gets the state of the partition as its last argument."""

    _stateful = True

    def __init__(
        self,
        client: QueueClient,
        address: str | Address,
        handler: Callable[P, R],
        *,
        version: str,
        reset: bool,
        **options: Any,
    ) -> None:
        if options.get("auto_ack"):
            raise InvalidRequest("a consumer with state does not take auto_ack")
        super().__init__(client, address, handler, **options)
        self._store = StateStore(client._brokers, self.address, version, reset)
        self._pauses = Backoff(0.1, 5.0)  # after a commit that failed

    async def run(self, drain_seconds: float | None = None) -> None:
        """Same as `Consumer.run`. Raises `Conflict` if there is state of another version."""
        while not self._stopping.is_set():
            try:
                await self._store.register()
                break
            except Unavailable as error:
                await self._wait_after(error)
        await super().run(drain_seconds)

    async def _handle_all(self, messages: list[Message]) -> Done | None:
        partitions: dict[str, list[Message]] = {}
        for message in messages:
            partitions.setdefault(message.partition_id, []).append(message)
        waiting = list(partitions.values())
        try:
            while waiting and not self._stopping.is_set():
                await self._handle_partition(waiting.pop(0))
        finally:
            if waiting:
                rest = [message for some in waiting for message in some]
                await asyncio.shield(self._client._give_back(rest))
        return None

    async def _handle_partition(self, messages: list[Message]) -> None:
        """Handle messages of one partition and commit the result."""
        async with self._released_if_cancelled(messages):
            fitting, payloads = await self._decoded(messages)
            if not fitting:
                return
            try:
                state = await self._store.load(fitting[0])
            except PenstockError as error:
                await self._client._give_back(fitting)
                await self._wait_after(error)
                return
            outcome, done = Outcome("completed"), 0
            size = len(fitting) if self._batches else 1
            while done < len(fitting) and not (done and self._stopping.is_set()):
                step = slice(done, done + size)
                before = state.copy()
                outcome = await self._attempt(payloads[step], fitting[step], state)
                if outcome.status != "completed":
                    state = before
                    break
                done += size
            await self._finish(fitting, done, state, outcome)

    async def _finish(
        self, messages: list[Message], done: int, state: State, outcome: Outcome
    ) -> None:
        """Commit the state of the first `done` messages. The next one has the outcome, if it
        failed; those behind go back.
        """
        failed = outcome.status != "completed"
        if done:
            try:
                await self._store.commit(messages[:done], state, release=not failed)
                self._client._leases.drop(messages[:done])
                self._pauses.reset()
            except (
                InvalidRequest,
                TooLarge,
            ) as error:  # the function produced a value that cannot be stored
                outcome = self._noted(Outcome("failed", str(error)), messages[:done], error)
                await self._answer(messages[:done], outcome)
                await self._client._give_back(messages[done:])
                return
            except PenstockError as error:
                # It may have been applied. If not, the messages come again, and a request that is
                # still under way is refused: their lease has ended.
                await self._client._give_back(messages)
                await self._wait_after(error)
                await self._store.register()  # raises when another version took over
                return
        rest = messages[done:]
        if failed:
            size = len(rest) if self._batches else 1
            await self._answer(rest[:size], outcome)
            rest = rest[size:]
        if rest and failed:
            await self._client._give_back(rest)
        elif rest:  # the commit has ended their lease
            self._client._leases.drop(rest)

    async def _wait_after(self, error: PenstockError) -> None:
        self._client.outage.note(error)
        await self._pause(self._pauses.delay())
