"""`penstock topic` in real processes, with pipes around it."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.topic import commands
from penstock.io.fs import Disk
from penstock.protocol.partitions import partition_of
from tests.support.cli import CliRunner
from tests.support.served import serving_in_thread
from tests.support.wait import until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    with serving_in_thread(tmp_path / "data") as served:
        yield served.address


def command(broker: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "topic", *arguments, "--broker", broker]


def topic(broker: str, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """The command in this process: a new one for each would take longer to start than to test."""
    done = CliRunner().invoke(
        commands,
        [*arguments, *(() if "--help" in arguments else ("--broker", broker))],
        input=stdin,
    )
    return done.exit_code, done.stdout_bytes, done.stderr_bytes


def out(broker: str, *arguments: str, stdin: bytes = b"") -> bytes:
    code, stdout, stderr = topic(broker, *arguments, stdin=stdin)
    stderr = (
        stderr
        if arguments[0] != "produce"
        else stderr.partition(b" stored in ")[2].partition(b"\n")[2]
    )
    assert (code, stderr) == (0, b"")
    return stdout


def test_produce_says_what_was_stored(broker: str) -> None:
    assert topic(broker, "produce", "t", stdin=b"a\nb\nc\n") == (
        0,
        b"",
        b"penstock: 3 records stored in t (offsets 0 to 2)\n",
    )
    assert (
        topic(broker, "produce", "t", stdin=b"d")[2]
        == b"penstock: 1 record stored in t (offset 3)\n"
    )
    assert topic(broker, "produce", "t", stdin=b"")[2] == b"penstock: no records were stored in t\n"
    assert topic(broker, "produce", "t", "--quiet", stdin=b"e\n") == (0, b"", b"")


def test_produce_on_a_full_disk_says_what_it_waits_for_and_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Disk, "free_bytes", lambda *_: 60_000)
    lines = 20 * (b"x" * 70_000 + b"\n")  # none of them fits
    with serving_in_thread(tmp_path / "data", free_space_reserve=1000) as served:
        assert topic(served.address, "produce", "t", stdin=b"small\n")[0] == 0
        began = time.monotonic()
        code, _, stderr = topic(served.address, "produce", "t", "--timeout", "2", stdin=lines)
        assert time.monotonic() - began < 40  # the time of one record, not of each batch
    stored, reason = stderr.splitlines()
    assert code == 1
    assert re.fullmatch(rb"penstock: no records were stored in t, of \d+ that were read", stored)
    assert re.fullmatch(
        rb"penstock: the disk has \d+ bytes free, of which 1000 are kept in reserve", reason
    )
    assert any("the producer of t waits for the broker" in message for message in caplog.messages)


def test_what_goes_in_on_standard_input_comes_out_on_standard_output(broker: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    out(broker, "create", "t")
    out(broker, "produce", "t", stdin=lines)
    assert out(broker, "consume", "t", "-e") == lines
    assert out(broker, "consume", "t", "-e", "-o", "-2", "-f", r"%t %o %S %s\n") == (
        b"t 19998 10 line 19998\nt 19999 10 line 19999\n"
    )
    assert out(broker, "consume", "t", "-o", "5", "-n", "2") == b"line 5\nline 6\n"
    assert out(broker, "consume", "t", "-e", "-o", "@2000-01-01", "-n", "1") == b"line 0\n"
    assert out(broker, "consume", "t", "-e", "-o", "latest") == b""
    assert out(broker, "consume", "t", "--last", "1", "-e") == b"line 19999\n"
    record = json.loads(out(broker, "consume", "t", "-n", "1", "--json"))
    assert record == {"offset": 0, "topic": "t", "payload": "line 0"}
    details = json.loads(out(broker, "describe", "t", "--json"))
    assert (details["first_offset"], details["next_offset"], details["records"]) == (
        0,
        20_000,
        20_000,
    )


def test_records_may_be_files_or_end_with_anything(broker: str, tmp_path: Path) -> None:
    out(broker, "produce", "t", "-D", r"\0", stdin=b"a\nb\0c\0")
    (tmp_path / "one").write_bytes(b"\xff\n\n")
    out(broker, "produce", "t", "--whole", str(tmp_path / "one"))
    result = [json.loads(line) for line in out(broker, "consume", "t", "-e", "--json").splitlines()]
    assert [(record["payload"], record.get("encoding")) for record in result] == [
        ("a\nb", None),
        ("c", None),
        ("/woK", "base64"),
    ]


def test_a_group_goes_on_where_it_stopped(broker: str) -> None:
    out(broker, "produce", "t", stdin=b"a\nb\nc\n")
    assert out(broker, "consume", "t", "-g", "g", "-n", "2") == b"a\nb\n"
    assert out(broker, "consume", "t", "-g", "g", "-e") == b"c\n"
    assert out(broker, "consume", "t", "-g", "g", "-e") == b""


def test_refusals_go_to_standard_error_with_their_exit_code(broker: str) -> None:
    for arguments, code, said in (
        (["describe", "none"], 1, b"does not exist"),
        (["consume", "none", "-e"], 1, b"does not exist"),
        (["create", "a/b"], 1, b"must not contain"),
        (["consume", "none", "-o", "sometime"], 2, b"not an offset"),
        (["produce", "t", "/does/not/exist"], 1, b"No such file"),
        (["delete", "none"], 1, b"does not exist"),
    ):
        result, stdout, stderr = topic(broker, *arguments)
        assert (result, stdout) == (code, b""), stderr
        assert said in stderr
    out(broker, "create", "t")
    assert topic(broker, "delete", "t")[0] == 2
    out(broker, "delete", "t", "--yes")
    assert topic(broker, "describe", "t")[0] == 1


def test_verify_finds_a_flipped_bit(broker: str, tmp_path: Path) -> None:
    out(broker, "produce", "t", stdin=b"a\nb\nc\n")
    data = ["--data-dir", str(tmp_path / "data")]
    assert out(broker, "verify", *data, "--live").startswith(b"t: sound: 3 records")
    log = tmp_path / "data" / "t" / "data.log"
    damaged = bytearray(log.read_bytes())
    damaged[-1] ^= 1
    log.write_bytes(damaged)
    code, stdout, _ = topic(broker, "verify", "t", *data, "--live")
    assert (code, b"DAMAGED" in stdout, b"data.log" in stdout) == (1, True, True)
    code, stdout, _ = topic(broker, "verify", "t", *data, "--live", "--json")
    assert (code, len(json.loads(stdout)["findings"]) > 0) == (1, True)
    assert topic(broker, "verify", "none", *data)[0] == 1


def test_ctrl_c_ends_it_at_once_with_130(broker: str) -> None:
    out(broker, "produce", "t", stdin=b"only\n")
    reading = subprocess.Popen(
        command(broker, "consume", "t"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A runner started in the background ignores SIGINT, and its children would with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert reading.stdout is not None
    assert reading.stdout.readline() == b"only\n"
    reading.send_signal(signal.SIGINT)
    assert reading.wait(10) == 130
    assert reading.communicate()[1] == b""


def test_a_reader_that_leaves_ends_it_quietly(broker: str) -> None:
    out(broker, "produce", "t", stdin=b"".join(b"%d\n" % number for number in range(100_000)))
    source = subprocess.Popen(
        command(broker, "consume", "t"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert source.stdout is not None
    assert source.stdout.readline() == b"0\n"
    source.stdout.close()
    until(lambda: source.poll() is not None)
    assert source.returncode == 141
    assert source.stderr is not None
    assert source.stderr.read() == b""
    source.stderr.close()


def test_keys_and_partitions_from_a_shell(broker: str) -> None:
    out(broker, "create", "t", "--format", "kafka", "--partitions", "3")
    about = json.loads(out(broker, "describe", "t", "--json"))
    assert (about["format"], about["partitions"]) == ("kafka", 3)
    lines = b"".join(b"key %d:value %d\n" % (i % 5, i) for i in range(20))
    out(broker, "produce", "t", "-K", ":", stdin=lines)
    read = [out(broker, "consume", "t", "-e", "-p", str(n), "-f", r"%k:%s\n") for n in range(3)]
    assert sorted(b"".join(read).splitlines()) == sorted(lines.splitlines())
    for number, text in enumerate(read):
        keys = {line.partition(b":")[0] for line in text.splitlines()}
        assert {partition_of(key, 3) for key in keys} <= {number}
    out(broker, "produce", "t", "-p", "2", stdin=b"last\n")
    last = json.loads(out(broker, "consume", "t", "-e", "-p", "2", "-o", "-1", "--json"))
    assert (last["payload"], "key" in last, last["timestamp"] > 0) == ("last", False, True)
    keyed = json.loads(out(broker, "consume", "t", "-n", "1", "-p", "0", "--json"))
    assert keyed["key"].startswith("key ")
    assert topic(broker, "create", "u", "--partitions", "2")[0] == 1
