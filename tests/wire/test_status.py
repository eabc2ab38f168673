"""One table of statuses for every protocol."""

import inspect

import msgspec
import pytest

from penstock import errors
from penstock.protocol.status import TABLE, TcpStatus, is_expected, status_of


def test_every_error_class_has_a_row() -> None:
    classes = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.PenstockError)
    ]
    assert len(classes) > 10
    assert [kind.__name__ for kind in classes if kind not in TABLE] == []


def test_the_status_bytes_are_those_of_the_protocol() -> None:
    assert {status.name: status.value for status in TcpStatus} == {
        "SUCCESS": 0,
        "TOPIC_NOT_FOUND": 1,
        "INVALID_OFFSET": 2,
        "SERIALIZATION": 3,
        "PRODUCE_FAILED": 4,
        "INTERNAL": 5,
        "INVALID_REQUEST": 6,
        "PAYLOAD_TOO_LARGE": 7,
        "UNKNOWN_COMMAND": 8,
        "UNAUTHORIZED": 9,
        "FORBIDDEN": 10,
    }


@pytest.mark.parametrize(
    ("error", "http", "tcp"),
    [
        (errors.NotFound("x"), 404, TcpStatus.TOPIC_NOT_FOUND),
        (errors.InvalidOffset("x"), 400, TcpStatus.INVALID_OFFSET),
        (errors.TooLarge("x"), 413, TcpStatus.PAYLOAD_TOO_LARGE),
        (errors.StorageFull("x"), 507, TcpStatus.PRODUCE_FAILED),
        (errors.Unavailable("x"), 503, TcpStatus.INTERNAL),
        (msgspec.ValidationError("x"), 400, TcpStatus.SERIALIZATION),
        (RuntimeError("x"), 500, TcpStatus.INTERNAL),
    ],
)
def test_an_error_has_one_meaning_in_every_protocol(
    error: Exception, http: int, tcp: TcpStatus
) -> None:
    assert status_of(error) == (http, tcp)


def test_a_subclass_counts_as_its_base_and_a_stranger_is_unexpected() -> None:
    class Narrow(errors.Conflict):
        pass

    assert status_of(Narrow("x")).http == 409
    assert is_expected(Narrow("x"))
    assert not is_expected(KeyError("x"))
