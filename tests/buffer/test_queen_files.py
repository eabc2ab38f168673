"""Buffer directories that Queen MQ wrote: both of its formats, all of its names."""

import json
import struct

import httpx

from penstock.buffer.events import count_events, windows
from penstock.io.fs import DISK
from penstock.protocol.buffer_frames import is_framed
from tests.support.broker import BrokerProcess
from tests.support.buffers import Store, buffering, names
from tests.support.wait import eventually


def event(number: object, **more: object) -> bytes:
    """An event as Queen MQ 0.15 serialises it: sorted camelCase keys, no spaces."""
    fields = {
        "failover": True,
        "partition": "p",
        "payload": {"n": number},
        "queue": "q",
        "transactionId": f"tx-{number}",
    }
    return json.dumps({**fields, **more}, sort_keys=True, separators=(",", ":")).encode()


def frames(*events: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in events)


def lines(*events: bytes) -> bytes:
    return b"".join(one + b"\n" for one in events)


def stored(store: Store) -> list[int]:
    return [json.loads(payload)["n"] for payload in store.payloads("q", "p")]


def read(path):
    """The payloads' numbers of a file, what is damaged in it, and what is torn."""
    numbers, bad, torn = [], [], b""
    for window in windows(DISK, path):
        numbers += [json.loads(item.payload)["n"] for item in window.items]
        bad += window.bad
        torn += window.torn
    return numbers, bad, torn


def test_the_bytes_of_a_frame(tmp_path):
    path = tmp_path / "failover.buf"
    golden = (
        b'\x60\x00\x00\x00{"failover":true,"partition":"p","payload":{"n":1},"queue":"q",'
        b'"transactionId":"t","traceId":""}'
    )
    path.write_bytes(golden)
    assert is_framed(golden)
    [window] = [window for window in windows(DISK, path) if window.items]
    [item] = window.items
    assert (item.queue, item.partition, item.payload) == ("q", "p", b'{"n":1}')
    assert (item.transaction_id, item.trace_id) == ("t", None)


async def test_a_directory_of_queen_is_replayed_whole_and_in_its_order(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "failed").mkdir()
    old = "019a0c11-0001-7000-8000-1234567890ab"
    (tmp_path / "failed" / "failover_2024-01-15T10:30:00.buf").write_bytes(frames(event(1)))
    # moved there after the file that follows was begun
    (tmp_path / "failed" / "failover_019a0c11-0009-7000-8000-1234567890ab.buf").write_bytes(
        frames(event(2))
    )
    (tmp_path / "failover_processing.buf").write_bytes(frames(event(3), event(4)))
    (tmp_path / "failover.buf").write_bytes(frames(event(5)))
    (tmp_path / f"failover_{old}.buf").write_bytes(lines(event(6)))  # camelCase lines
    (tmp_path / f"failover_{old[:9]}0002{old[13:]}.buf.tmp").write_bytes(frames(event(7)))
    (tmp_path / "qos0_processing.buf").write_bytes(frames(event(8)))
    (tmp_path / "qos0.buf").write_bytes(frames(event(9)))
    store = Store()
    async with buffering(tmp_path, store) as buffer:
        assert stored(store) == list(range(1, 10))
        assert buffer.status.report().quarantined == buffer.status.report().failed == 0
        await eventually(lambda: names(tmp_path) == names(tmp_path / "failed") == [])
    assert "Recovery: 9 of 9 events stored" in caplog.text
    assert "cut short" not in caplog.text


async def test_the_order_survives_a_crash_between_adoption_and_replay(tmp_path):
    old = "019a0c11-0001-7000-8000-1234567890ab"
    (tmp_path / f"failover_{old}.buf").write_bytes(frames(event(3)))
    (tmp_path / "failover.buf").write_bytes(frames(event(2)))
    (tmp_path / "failover_processing.buf").write_bytes(frames(event(1)))
    store = Store(healthy=False)
    async with buffering(tmp_path, store):
        assert stored(store) == []
    store.go(True)
    async with buffering(tmp_path, store):
        assert stored(store) == [1, 2, 3]


def test_a_frame_of_any_length_is_told_from_a_line(tmp_path):
    """Some lengths start with the byte of `{` or of a newline."""
    path = tmp_path / "failover_019a0c11-7fe8.buf"
    shortest = len(event(1, pad=""))
    for size in range(shortest, shortest + 256):
        body = event(1, pad="x" * (size - shortest))
        for form in (frames, lines):
            path.write_bytes(form(body, body))
            assert read(path) == ([1, 1], [], b"")
            assert count_events(DISK, path) == 2


def test_a_damaged_or_cut_frame_does_not_hide_the_events_behind_it(tmp_path):
    path = tmp_path / "failover.buf"
    first, damaged, third, last = (frames(event(n)) for n in range(1, 5))
    damaged = damaged[:20] + b"\xff" + damaged[21:]
    path.write_bytes(first + damaged + third + last[:-3])
    assert read(path) == ([1, 3], [damaged], last[:-3])
    wrong_length = struct.pack("<I", 5_000_000) + event(2)
    path.write_bytes(first + wrong_length + third)
    assert read(path) == ([1, 3], [wrong_length], b"")
    path.write_bytes(first + last[:30] + third)  # the disk was full for a moment
    assert read(path) == ([1, 3], [last[:30]], b"")
    path.write_bytes(first + b"\0\0")
    assert read(path) == ([1], [], b"\0\0")


def test_frames_that_cross_the_windows_of_the_reader_are_read(tmp_path):
    path = tmp_path / "failover.buf"
    path.write_bytes(frames(*(event(n, pad="x" * 1_000_000) for n in range(12))))
    assert read(path) == (list(range(12)), [], b"")


def test_a_last_line_without_its_newline_that_is_an_event_is_not_torn(tmp_path):
    path = tmp_path / "failover_019a0c11-7fe8.buf"
    path.write_bytes(lines(event(1)) + event(2))
    assert read(path) == ([1, 2], [], b"")
    assert count_events(DISK, path) == 2


async def test_what_is_left_is_logged_instead_of_complete(tmp_path, caplog):
    caplog.set_level("INFO")
    name = "failover_019a0c11-0001-7000-8000-0000aaaaaaaa.buf"
    (tmp_path / name).write_bytes(lines(event(1), b"damage", event(2)))
    store = Store()
    store.poison = lambda item: b"2" in item.payload
    async with buffering(tmp_path, store) as buffer:
        assert stored(store) == [1]
        assert buffer.status.report().failed == buffer.status.report().quarantined == 1
    assert "replay complete" not in caplog.text
    assert f"replay of {name} incomplete: 1 events in failed/, 1 unreadable" in caplog.text
    assert "Recovery: 1 of 3 events stored" in caplog.text


async def test_events_without_a_transaction_id_are_stored_once_however_often_they_are_replayed(
    tmp_path,
):
    name = "failover_019a0c11-0001-7000-8000-1234567890ab.buf"
    bare = [b'{"queue":"q","partition":"p","payload":{"n":%d}}' % n for n in (1, 1, 2)]
    store = Store()
    for contents in (frames(*bare), lines(*bare)):
        store = Store()
        for _ in range(2):  # the second time as after a crash before the file was deleted
            (tmp_path / name).write_bytes(contents)
            async with buffering(tmp_path, store):
                assert stored(store) == [1, 1, 2]


async def test_a_trace_id_that_is_not_a_uuid_does_not_keep_a_message_from_its_queue(tmp_path):
    path = tmp_path / "failover_019a0c11-7fe8.buf"
    path.write_bytes(frames(event(1, traceId="trace-1", producerSub="alice")))
    [window] = [window for window in windows(DISK, path) if window.items]
    [item] = window.items
    assert (item.trace_id, item.producer) == (None, "alice")


def test_a_broker_that_takes_over_a_directory_of_queen_delivers_everything_in_it(
    database_url, tmp_path
):
    """A ledger: what Queen MQ answered with success is what consumers get, once and in order."""
    directory = tmp_path / "queen"
    (directory / "failed").mkdir(parents=True)
    numbers = iter(range(1000))

    def some(count: int) -> list[bytes]:
        """The next events of two partitions in turn."""
        return [event(n, partition=f"p{n % 2}") for n in (next(numbers) for _ in range(count))]

    (directory / "failed" / "failover_2024-01-15T10:30:00.buf").write_bytes(frames(*some(100)))
    (directory / "failover_processing.buf").write_bytes(frames(*some(150)))
    (directory / "failover.buf").write_bytes(frames(*some(50)))
    for name, form in (
        ("failover_019a0c11-0001-7000-8000-1234567890ab.buf", frames),
        ("failover_019a0c11-0002-7000-8000-1234567890ab.buf", lines),
        ("failover_019a0c11-0003-7000-8000-1234567890ac.buf.tmp", frames),
        ("qos0_processing.buf", frames),
        ("qos0.buf", frames),
        ("qos0_019a0c11-0004-7000-8000-1234567890ad.buf", lines),
    ):
        (directory / name).write_bytes(form(*some(100)))
    total = next(numbers)
    broker = BrokerProcess(
        tmp_path / "data", database_url=database_url, env={"FILE_BUFFER_DIR": str(directory)}
    )
    got: dict[str, list[int]] = {"p0": [], "p1": []}
    with broker, httpx.Client(base_url=broker.url) as http:
        while True:
            answer = http.get("/api/v1/pop/queue/q?batch=500&partitions=2&autoAck=true")
            if answer.status_code == 204:
                break
            for message in answer.json()["messages"]:
                got[message["partition"]].append(message["data"]["n"])
        status = http.get("/api/v1/status/buffers").json()
    assert got == {"p0": list(range(0, total, 2)), "p1": list(range(1, total, 2))}
    assert (status["pending"], status["failed"], status["quarantined"]) == (0, 0, 0)
    assert f"Recovery: {total} of {total} events stored" in broker.log
    assert "cut short" not in broker.log
    assert names(directory) == names(directory / "failed") == []
    assert not (directory / "quarantine").exists()
