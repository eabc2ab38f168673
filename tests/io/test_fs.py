"""The real file system: all or nothing appends, errors named by what can be done, no retry after a
failed sync.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageFailed, StorageFull
from penstock.io.fs import DISK


def test_an_append_of_more_pieces_than_the_kernel_takes_is_one_append(tmp_path: Path) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    pieces = [b"%d," % i for i in range(3000)]
    assert file.append([b"head"]) == 0
    assert file.append(pieces) == 4
    assert file.read_at(4, 1 << 20) == b"".join(pieces)
    assert file.size == (tmp_path / "f").stat().st_size


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, chunks, at: write(fd, [bytes(chunks[0])[:2]], at))
    assert file.append([b"abcdef", b"ghi"]) == 0
    assert (tmp_path / "f").read_bytes() == b"abcdefghi"


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed)]
)
def test_a_failed_append_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    file.append([b"kept"])

    def torn(fd: int, chunks: Any, at: int) -> int:
        os.pwrite(fd, b"ga", at)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", torn)
        with pytest.raises(error, match="f"):
            file.append([b"gone"])
    assert (tmp_path / "f").read_bytes() == b"kept"
    assert file.append([b"more"]) == 4


def test_after_a_failed_sync_the_file_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    file.append([b"x"])

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        with pytest.raises(StorageFailed):
            file.sync()
    for attempt in (file.sync, lambda: file.append([b"y"])):
        with pytest.raises(StorageFailed, match="earlier fsync"):
            attempt()
    assert file.read_at(0, 10) == b"x"


def test_a_file_outlives_its_name_for_whoever_holds_it(tmp_path: Path) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    file.append([b"still here"])
    DISK.remove(tmp_path / "f")
    DISK.remove(tmp_path / "f")
    assert file.read_at(0, 10) == b"still here"


def test_replace_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DISK.replace(tmp_path / "f", b"old")

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageFull):
            DISK.replace(tmp_path / "f", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_a_directory_that_is_gone_is_a_failed_disk_for_a_writer(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(StorageFailed, match="opening f failed"):
        DISK.open(gone / "f", create=True)
    with pytest.raises(StorageFailed, match="measuring gone failed"):
        DISK.free_bytes(gone)
    for read in (DISK.open, DISK.read, DISK.size):
        with pytest.raises(FileNotFoundError):
            read(gone / "f")
