"""Pushes and acks that happen together or not at all."""

from collections.abc import Sequence
from typing import Any, Self, Unpack

from penstock.client import tracing
from penstock.client.brokers import Brokers
from penstock.client.items import Item, PushOptions, ack_item, new_item, storable
from penstock.client.leases import LeaseKeeper
from penstock.client.messages import AckStatus, Address, Received
from penstock.contract import operations
from penstock.contract.noun import Noun
from penstock.contract.operation import Operation
from penstock.errors import Conflict


class TransactionStep(Noun, kw_only=True):
    """The result of one push or ack in a transaction."""

    type: str
    index: int
    success: bool
    transaction_id: str
    message_id: str | None = None
    partition_id: str | None = None
    queue_name: str | None = None
    error: str | None = None
    dlq: bool = False


class _Committed(Noun, kw_only=True):
    success: bool
    results: list[TransactionStep]
    error: str | None = None


_COMMIT = Operation("POST", operations.COMMIT_TRANSACTION.path, _Committed, "Commit")


class Transaction:
    """A set of pushes and acks that take effect together or not at all. Leaving the `async with`
    block commits it; an exception in the block discards it.

    If the connection breaks before the commit is answered, `Unavailable` is raised and the outcome
    is unknown. If it was not applied, the acknowledged messages are delivered again when their
    lease expires. The same holds after a `Conflict`, unless you acknowledge them before.
    """

    def __init__(self, brokers: Brokers, leases: LeaseKeeper) -> None:
        self._brokers, self._leases = brokers, leases
        self._operations: list[Item] = []
        self._acked: list[Received] = []
        self.results: list[TransactionStep]

    def push(
        self,
        address: str | Address,
        payload: Any,
        **options: Unpack[PushOptions],
    ) -> Self:
        """Add a push, with the parameters of `Client.push`. Raises `InvalidRequest` for a payload
        that JSON cannot express.
        """
        item = tracing.created(new_item(address, payload, **options))
        self._operations.append({"type": "push", "items": [item]})
        return self

    def ack(
        self,
        message: Received | Sequence[Received],
        status: AckStatus = "completed",
        *,
        error: str | None = None,
    ) -> Self:
        """Add an ack, with the statuses of `Client.ack`."""
        for one in [message] if isinstance(message, Received) else message:
            operation = {
                "type": "ack",
                "status": status,
                "consumerGroup": one.consumer_group,
                **ack_item(one),
            }
            if error is not None:
                operation["error"] = storable(error)
            self._operations.append(operation)
            self._acked.append(one)
        return self

    async def commit(self) -> list[TransactionStep]:
        """Commit the transaction. Raises `Conflict` if it could not be applied; nothing of it has
        taken effect then.
        """
        if not self._operations:
            return []
        leases = list(
            dict.fromkeys(message.lease_id for message in self._acked if message.lease_id)
        )
        body = {"operations": self._operations, "requiredLeases": leases}
        try:
            answer = await self._brokers.call(_COMMIT, body=body)
        finally:  # as with an ack
            self._leases.drop(self._acked)
        if not answer.success:
            raise Conflict(answer.error or "the transaction was not applied")
        self._operations, self._acked = [], []
        self.results = answer.results
        return self.results

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        if kind is None:
            await self.commit()
