"""Tokens over SASL: who is let in, what they may do, and until when."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.kafka_wire import KafkaWire, plain_batch
from tests.support.served import Served, serving
from tests.support.tokens import SECRET, token

HANDSHAKE, AUTHENTICATE, METADATA, CREATE, DELETE, LIST_GROUPS = 17, 36, 3, 19, 20, 16
AUTH = {"secret": SECRET}


async def authenticate(wire: KafkaWire, value: str, mechanism: str = "PLAIN") -> Any:
    assert (await wire.ask(HANDSHAKE, 1, mechanism=mechanism)).error_code == 0
    plain = b"\0me\0" + value.encode()
    bearer = b"n,,\x01auth=Bearer " + value.encode() + b"\x01\x01"
    return await wire.ask(AUTHENTICATE, 2, auth_bytes=plain if mechanism == "PLAIN" else bearer)


async def known(served: Served, role: str) -> KafkaWire:
    wire = await KafkaWire.connect(served.kafka.port)
    assert (await authenticate(wire, token(role))).error_code == 0
    return wire


async def test_a_connection_without_a_token_learns_nothing(tmp_path: Path):
    async with serving(tmp_path, auth=AUTH) as served:
        await served.topics.create("secret", form="kafka")
        for key, version in ((METADATA, 8), (LIST_GROUPS, 4), (60, 0), (22, 4), (1, 11)):
            wire = await KafkaWire.connect(served.kafka.port)
            assert (await wire.ask(18, 3)).error_code == 0  # the versions are no secret
            wire.send(key, version, **({"topics": None} if key == METADATA else {}))
            assert await wire.closed()
            wire.close()


async def test_a_connection_that_shows_no_token_is_closed_in_time(tmp_path: Path):
    async with serving(tmp_path, auth=AUTH, kafka={"auth_timeout": 0.3}) as served:
        began = time.monotonic()
        silent = await KafkaWire.connect(served.kafka.port)
        assert await silent.closed()
        assert time.monotonic() - began >= 0.3
        busy = await KafkaWire.connect(served.kafka.port)
        await busy.ask(18, 3)
        await busy.ask(HANDSHAKE, 1, mechanism="PLAIN")
        assert await busy.closed()
        silent.close()
        busy.close()


async def test_a_wrong_token_is_refused_with_a_reason_and_closed(tmp_path: Path):
    async with serving(tmp_path, auth=AUTH) as served:
        for value, mechanism in (
            ("nonsense", "PLAIN"),
            ("", "PLAIN"),
            (token(lifetime=-3600), "PLAIN"),
            ("nonsense", "OAUTHBEARER"),
        ):
            wire = await KafkaWire.connect(served.kafka.port)
            answer = await authenticate(wire, value, mechanism)
            assert answer.error_code == 58
            assert answer.error_message
            assert await wire.closed()
            wire.close()
        wire = await KafkaWire.connect(served.kafka.port)
        refused = await wire.ask(HANDSHAKE, 1, mechanism="GSSAPI")
        assert (refused.error_code, refused.mechanisms) == (33, ("PLAIN", "OAUTHBEARER"))
        assert (await wire.ask(AUTHENTICATE, 2, auth_bytes=b"\0a\0b")).error_code == 34
        assert await wire.closed()
        wire.close()


async def test_a_frame_before_the_token_is_small(tmp_path: Path):
    async with serving(tmp_path, auth=AUTH) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        wire.writer.write((1 << 20).to_bytes(4, "big") + bytes(1000))
        assert await wire.closed()
        wire.close()


async def test_the_answer_says_when_the_token_expires_and_an_expired_one_ends_the_connection(
    tmp_path: Path,
):
    auth = {**AUTH, "clock_skew": 0.0}
    async with serving(tmp_path, auth=auth, kafka={"auth_timeout": 0.2}) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        answer = await authenticate(wire, token("admin", lifetime=2))
        assert 0 < answer.session_lifetime.total_seconds() <= 3
        assert (await wire.ask(METADATA, 8, topics=None)).topics == ()
        assert await wire.closed()  # by the sweep: it does not authenticate again
        wire.close()
        again = await KafkaWire.connect(served.kafka.port)
        await authenticate(again, token("admin", lifetime=60))
        assert (await authenticate(again, token("read-only"))).error_code == 0
        assert (await again.ask(METADATA, 8, topics=None)).topics == ()
        again.close()


async def test_roles_are_those_of_the_other_protocols(tmp_path: Path):
    async with serving(tmp_path, auth=AUTH) as served:
        await served.topics.create("orders", form="kafka")
        reader, writer, admin = [
            await known(served, role) for role in ("read-only", "read-write", "admin")
        ]
        new = [{"name": "new", "num_partitions": 1, "replication_factor": 1}]
        assert (await reader.produce("orders", plain_batch(b"no"))).error_code == 29
        assert (await reader.ask(CREATE, 4, topics=new)).topics[0].error_code == 29
        assert (await reader.ask(METADATA, 8, topics=[{"name": "auto"}])).topics[0].error_code == 3
        join = {
            "group_id": "g",
            "session_timeout": timedelta(seconds=10),
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        assert (await reader.ask(11, 5, **join)).error_code == 30
        assert (await reader.ask(22, 4, transactional_id=None)).error_code == 31
        assert (await writer.produce("orders", plain_batch(b"yes"))).error_code == 0
        assert (await reader.fetch("orders", 0)).high_watermark == 1
        assert (await writer.ask(CREATE, 4, topics=new)).topics[0].error_code == 0
        names = {"topic_names": ["new"]}
        assert (await writer.ask(DELETE, 5, **names)).responses[0].error_code == 29
        assert (await admin.ask(DELETE, 5, **names)).responses[0].error_code == 0
        for wire in (reader, writer, admin):
            wire.close()
