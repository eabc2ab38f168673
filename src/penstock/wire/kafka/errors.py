"""Kafka's error codes (`kio` names them), and which of them our errors become."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from kio.schema.errors import ErrorCode as Code

from penstock import errors
from penstock.log.format import InvalidRecord
from penstock.log.producers import OutOfOrder, ProducerFenced
from penstock.protocol.status import is_expected
from penstock.topics.assigned_groups import MemberRefused
from penstock.topics.shared.groups import NotCoordinator
from penstock.wire.kafka.codec import Values

H = TypeVar("H")  # the handlers
C = TypeVar("C")  # the connection

log = logging.getLogger("penstock.kafka")


class Refused(errors.InvalidRequest):
    """A request is refused with a code that none of our errors has."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


# By class, then its bases. Codes that clients retry stand for what may pass.
_CODES: dict[type[BaseException], Code] = {
    InvalidRecord: Code.invalid_record,
    OutOfOrder: Code.out_of_order_sequence_number,
    ProducerFenced: Code.invalid_producer_epoch,
    errors.NotFound: Code.unknown_topic_or_partition,
    errors.InvalidOffset: Code.offset_out_of_range,
    errors.TooLarge: Code.message_too_large,
    NotCoordinator: Code.not_coordinator,
    errors.Unauthorized: Code.sasl_authentication_failed,
    errors.InvalidRequest: Code.invalid_request,
    errors.Conflict: Code.invalid_request,
    errors.Unavailable: Code.request_timed_out,
    errors.Damaged: Code.kafka_storage_error,
    errors.StorageError: Code.kafka_storage_error,
}


def code_of(error: BaseException) -> Code:
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, MemberRefused):
        return Code[error.refusal.name.lower()]
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    if not is_expected(error):
        log.error("a request failed unexpectedly", exc_info=error)
    return Code.unknown_server_error


def text_of(error: BaseException) -> str:
    """Return the text that a client may see."""
    return str(error) if is_expected(error) else "internal error; the server's log has the details"


def failed(error: BaseException) -> dict[str, Any]:
    """Return the fields of an answer with this error."""
    return {"error_code": code_of(error), "error_message": text_of(error)}


def with_code(
    handle: Callable[[H, C, Any], Awaitable[Values]],
) -> Callable[[H, C, Any], Awaitable[Values]]:
    """Turn an error that the handler raises into an answer with its error code."""

    @wraps(handle)
    async def handle_or_refuse(handlers: H, connection: C, request: Any) -> Values:
        try:
            return await handle(handlers, connection, request)
        except errors.PenstockError as error:
            member = getattr(error, "member", "") or getattr(request.body, "member_id", "")
            return failed(error) | {"member_id": member}

    return handle_or_refuse


async def each_topic(
    asked: Iterable[Any], answer: Callable[[Any], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the answers for each topic of a request, by its name."""
    answers = []
    for one in asked:
        entry: dict[str, Any] = {"name": one if isinstance(one, str) else one.name}
        try:
            entry |= await answer(one)
        except Exception as error:  # noqa: BLE001 - answered for this topic
            entry |= failed(error)
        answers.append(entry)
    return answers


async def each_partition(
    topics: Iterable[Any], answer: Callable[[str, Any], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the answers for each partition of a request. Some versions name fields otherwise; all
    names are set, because an answer leaves out what its version does not have.
    """
    answers = []
    for topic in topics:
        name = topic.name if hasattr(topic, "name") else topic.topic
        partitions = []
        for asked in topic.partitions:
            number = getattr(asked, "partition_index", getattr(asked, "partition", 0))
            entry: dict[str, Any] = {"partition_index": number, "partition": number}
            try:
                entry |= await answer(name, asked)
            except Exception as error:  # noqa: BLE001 - answered for this partition
                unknown = dict.fromkeys(("offset", "end_offset", "low_watermark"), -1)
                entry |= {"error_code": code_of(error), **unknown}
            partitions.append(entry)
        answers.append({"name": name, "topic": name, "partitions": partitions})
    return answers
