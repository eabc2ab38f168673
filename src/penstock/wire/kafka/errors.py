"""Kafka's error codes, and which of them our errors become."""

import logging
from enum import IntEnum
from typing import Any

from penstock import errors
from penstock.log.format import InvalidRecord
from penstock.log.producers import OutOfOrder, ProducerFenced
from penstock.protocol.status import is_expected

log = logging.getLogger("penstock.kafka")


class Code(IntEnum):
    UNKNOWN = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    INVALID_RECORD = 87


class Refused(errors.InvalidRequest):
    """A request is refused with a code that none of our errors has."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


# By class, then its bases. Codes that clients retry stand for what may pass.
_CODES: dict[type[BaseException], Code] = {
    InvalidRecord: Code.INVALID_RECORD,
    OutOfOrder: Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ProducerFenced: Code.INVALID_PRODUCER_EPOCH,
    errors.NotFound: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.InvalidOffset: Code.OFFSET_OUT_OF_RANGE,
    errors.TooLarge: Code.MESSAGE_TOO_LARGE,
    errors.Forbidden: Code.TOPIC_AUTHORIZATION_FAILED,
    errors.Unauthorized: Code.SASL_AUTHENTICATION_FAILED,
    errors.InvalidRequest: Code.INVALID_REQUEST,
    errors.Conflict: Code.INVALID_REQUEST,
    errors.Unavailable: Code.REQUEST_TIMED_OUT,
    errors.Damaged: Code.KAFKA_STORAGE_ERROR,
    errors.StorageError: Code.KAFKA_STORAGE_ERROR,
}


def code_of(error: BaseException) -> Code:
    if isinstance(error, Refused):
        return error.code
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    if not is_expected(error):
        log.error("a request failed unexpectedly", exc_info=error)
    return Code.UNKNOWN


def text_of(error: BaseException) -> str:
    """Return the text that a client may see."""
    return str(error) if is_expected(error) else "internal error; the server's log has the details"


def failed(error: BaseException) -> dict[str, Any]:
    """Return the fields of an answer with this error."""
    return {"error_code": code_of(error), "error_message": text_of(error)}
