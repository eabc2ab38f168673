"""The answers to an operator's requests, as structs.

Field names are the HTTP API's in snake case. Additional fields of a newer broker are ignored.
"""

from typing import TypedDict

from penstock.contract.noun import Noun


class QueueSettings(TypedDict, total=False):
    """The options of `Client.configure`. `QueueOptions` has their defaults and meanings."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    delayed_processing: int
    window_buffer: int
    max_size: int
    ttl: int
    priority: int
    dead_letter_queue: bool
    dlq_after_max_retries: bool
    retention_enabled: bool
    retention_seconds: int
    completed_retention_seconds: int
    max_wait_time_seconds: int
    encryption_enabled: bool
    record_deliveries: bool
    ordering: str


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
