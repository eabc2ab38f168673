"""A Kafka client for tests that says exactly what a test wants to: requests of any version, written
and read by kio's own serializer.
"""

import asyncio
import dataclasses
import io
import struct
import types
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from penstock.protocol.kafka_batch import NewRecord, encode_head, encode_records

LENGTH = struct.Struct(">i")


def request_bytes(key: int, version: int, values: dict[str, Any], correlation: int = 1) -> bytes:
    """A frame; fields that are not named get a value of their type."""
    schema = load_request_schema(key, version)
    header = schema.__header_schema__
    head = {
        "request_api_key": key,
        "request_api_version": version,
        "correlation_id": correlation,
        "client_id": "wire",
    }
    out = io.BytesIO()
    entity_writer(header)(out, _build(header, head))
    entity_writer(schema)(out, _build(schema, values))
    data = out.getvalue()
    return LENGTH.pack(len(data)) + data


def _build(schema: Any, values: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        if field.name in values:
            fields[field.name] = _value(field.type, values[field.name])
        elif field.default is dataclasses.MISSING:
            fields[field.name] = _empty(field)
    return schema(**fields)


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not types.NoneType)
    if get_origin(kind) is tuple and value is not None:
        return tuple(_value(get_args(kind)[0], one) for one in value)
    return _build(kind, value) if isinstance(value, dict) else value


def _empty(field: Any) -> Any:
    if isinstance(field.type, types.UnionType):
        return None
    if get_origin(field.type) is tuple:
        return ()
    kafka_type = field.metadata["kafka_type"]
    if kafka_type.startswith("timedelta"):
        return timedelta(0)
    return {"string": "", "bytes": b"", "bool": False}.get(kafka_type, 0)


def encode_batch(records: Sequence[NewRecord], timestamp: int, **head: Any) -> bytes:
    """A record batch; records without a timestamp get `timestamp`."""
    times = [timestamp if one.timestamp is None else one.timestamp for one in records]
    encoded = encode_records(records, times)
    bounds = (times[0], max(times))
    return encode_head([encoded], len(records), timestamps=bounds, **head) + encoded


def plain_batch(*values: bytes, **head: Any) -> bytes:
    """A record batch with these values."""
    return encode_batch([NewRecord(value) for value in values], 1_000, **head)


class KafkaWire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._correlation = 0

    @classmethod
    async def connect(cls, port: int) -> "KafkaWire":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=64 << 20))

    def send(self, key: int, version: int, **values: Any) -> int:
        """Its correlation id."""
        self._correlation += 1
        self.writer.write(request_bytes(key, version, values, self._correlation))
        return self._correlation

    async def receive(self, key: int, version: int) -> tuple[int, Any]:
        """The next answer: its correlation id and body, of which nothing is left over."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(4))
        data = await self.reader.readexactly(length)
        schema = load_response_schema(key, version)
        header: Any = schema.__header_schema__
        head, size = entity_reader(header)(data, 0)
        body, read = entity_reader(schema)(data, size)
        assert size + read == len(data)
        return head.correlation_id, body

    async def ask(self, key: int, version: int, **values: Any) -> Any:
        sent = self.send(key, version, **values)
        correlation, body = await self.receive(key, version)
        assert correlation == sent
        return body

    async def produce(
        self, topic: str, data: bytes, *, partition: int = 0, acks: int = -1, version: int = 9
    ) -> Any:
        """The answer for the partition."""
        partitions = [{"index": partition, "records": data}]
        topics = [{"name": topic, "partition_data": partitions}]
        answer = await self.ask(0, version, acks=acks, topic_data=topics)
        return answer.responses[0].partition_responses[0]

    async def fetch(self, topic: str, offset: int, *, partition: int = 0, **options: Any) -> Any:
        """The answer for the partition; times in seconds."""
        most = options.pop("partition_max_bytes", 1 << 20)
        wait = timedelta(seconds=options.pop("max_wait", 0))
        partitions = [{"partition": partition, "fetch_offset": offset, "partition_max_bytes": most}]
        topics = [{"topic": topic, "partitions": partitions}]
        asked = {"min_bytes": 1, "max_bytes": 1 << 20, **options}
        answer = await self.ask(1, 11, max_wait=wait, topics=topics, **asked)
        assert answer.session_id == 0
        return answer.responses[0].partitions[0]

    async def closed(self) -> bool:
        """Whether the server closes the connection without an answer."""
        return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.close()
