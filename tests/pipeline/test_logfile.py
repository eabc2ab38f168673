"""Reading topic files beside their owner (penstock.log.topic_files)."""

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import Damaged, InvalidOffset
from penstock.log import topic_files
from penstock.log.topic_files import TopicFiles
from penstock.pipeline.source_columns import topic_batch


def records(files: TopicFiles, start: int, end: int) -> list[tuple[int, bytes]]:
    collected = []
    for piece in files.read(start, end):
        batch = topic_batch("t", piece, ["offset", "payload"])
        collected += list(
            zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        )
    return collected


def test_any_range_gives_exactly_its_records(tmp_path: Path, write_topic) -> None:
    payloads = [bytes([65 + i % 26]) * (i * 7 % 50) for i in range(1000)]
    write_topic("orders", payloads[:1], payloads[1:400], payloads[400:], segment_bytes=5000)
    files = TopicFiles(tmp_path / "orders")
    assert files.bounds() == (0, 1000)
    assert len(list((tmp_path / "orders").glob("data-*.log"))) >= 1
    for start, end in [(0, 1000), (0, 1), (399, 401), (999, 1000), (500, 500), (17, 983)]:
        assert records(files, start, end) == [(i, payloads[i]) for i in range(start, end)]


def test_a_read_is_cut_into_bounded_pieces(tmp_path: Path, write_topic, monkeypatch) -> None:
    monkeypatch.setattr(topic_files, "MAX_ROWS", 64)
    monkeypatch.setattr(topic_files, "MAX_BYTES", 1000)
    write_topic("orders", [b"x" * 90] * 300 + [b"y" * 5000])
    pieces = list(TopicFiles(tmp_path / "orders").read(0, 301))
    assert all(len(piece.offsets) <= 64 for piece in pieces)
    assert all(len(piece.raw) <= 1000 or len(piece.offsets) == 1 for piece in pieces)
    assert np.concatenate([piece.offsets for piece in pieces]).tolist() == list(range(301))


def test_records_carry_the_time_they_were_appended(tmp_path: Path, write_topic) -> None:
    write_topic("orders", [b"a", b"b"])
    write_topic("orders", [b"c"])
    files = TopicFiles(tmp_path / "orders")
    times = np.concatenate([piece.times for piece in files.read(0, 3)])
    assert times[0] == times[1] < times[2]
    assert files.offset_at(int(times[2])) == 2
    assert files.offset_at(int(times[0])) == 0
    assert files.offset_at(int(times[2]) + 1) == 3


def test_the_original_servers_directory_has_the_files_time(tmp_path: Path, write_topic) -> None:
    write_topic("orders", [b"a", b"b"])
    for name in ("batches.crc", "incarnation", "checkpoint"):
        (tmp_path / "orders" / name).unlink()
    files = TopicFiles(tmp_path / "orders")
    (piece,) = files.read(0, 2)
    assert (
        piece.times.tolist() == [(tmp_path / "orders" / "data.log").stat().st_mtime_ns // 1000] * 2
    )
    assert files.incarnation == "0" * 32


def test_damage_is_reported_not_read(tmp_path: Path, write_topic) -> None:
    write_topic("orders", [b"aaaa", b"bbbb", b"cccc"])
    data = bytearray((tmp_path / "orders" / "data.log").read_bytes())
    data[16] ^= 1  # the second record's offset
    (tmp_path / "orders" / "data.log").write_bytes(data)
    with pytest.raises(Damaged, match="offset 1"):
        records(TopicFiles(tmp_path / "orders"), 0, 3)


def test_an_offset_that_aged_out_is_an_error_that_names_the_first_one_left(
    tmp_path: Path, write_topic
) -> None:
    write_topic("orders", *[[b"x" * 100] * 10] * 5, segment_bytes=2000)
    sealed = sorted((tmp_path / "orders").glob("*-*0.*"))
    first = min(int(path.stem.partition("-")[2]) for path in sealed)
    for path in sealed:
        if f"{first:020d}" in path.name:
            path.unlink()
    files = TopicFiles(tmp_path / "orders")
    with pytest.raises(InvalidOffset, match=f"the first one left is {files.bounds()[0]}"):
        records(files, first, 50)
    assert files.bounds()[0] > first


def test_a_roll_between_listing_and_opening_loses_nothing(
    tmp_path: Path, write_topic, monkeypatch
) -> None:
    write_topic("orders", [b"x" * 100] * 10)
    files = TopicFiles(tmp_path / "orders")
    listed = files._bases
    rolled = []

    def list_then_roll():
        result = listed()
        if not rolled:
            rolled.append(True)
            write_topic("orders", [b"y" * 100] * 10, segment_bytes=500)
        return result

    monkeypatch.setattr(files, "_bases", list_then_roll)
    assert [offset for offset, _ in records(files, 0, 20)] == list(range(20))
