"""Requests of Prometheus remote write 1.0, made without a library: it is three small messages."""

import struct

import cramjam

HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "User-Agent": "tests/1",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
Series = dict[str, str]  # labels
Samples = list[tuple[float, int]]  # values, and milliseconds since 1970


def write_request(*series: tuple[Series, Samples]) -> bytes:
    """The body of a request, compressed."""
    return bytes(cramjam.snappy.compress_raw(write_message(*series)))


def write_message(*series: tuple[Series, Samples]) -> bytes:
    return b"".join(_field(1, _time_series(labels, samples)) for labels, samples in series)


def _time_series(labels: Series, samples: Samples) -> bytes:
    parts = [
        _field(1, _field(1, name.encode()) + _field(2, value.encode()))
        for name, value in sorted(labels.items())
    ]
    parts += [
        _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(time))
        for value, time in samples
    ]
    return b"".join(parts)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])
