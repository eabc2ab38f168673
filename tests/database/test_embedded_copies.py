"""A data directory has one database, wherever it is, and a copy of the directory has another one."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client import SyncClient
from penstock.config import cluster_link
from penstock.config.database_url import url_here
from penstock.config.schema import Config
from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import NotFound, Unavailable
from tests.database.test_embedded import mode, rows
from tests.support import guard
from tests.support.broker import ServeProcess

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change users")
SERVE = """
import sys
from pathlib import Path
from penstock.config import cluster_link
cluster_link.OUTSIDE = Path(sys.argv.pop(1))
from penstock.__main__ import main
main()
"""


@pytest.fixture
def working_directory(scratch, monkeypatch) -> Path:
    """Users name the data directory relative to where they are, and so does the default."""
    monkeypatch.chdir(scratch)
    return scratch


@pytest.fixture
def closed(scratch, monkeypatch) -> Path:
    """A directory that the server's user cannot enter."""
    directory = scratch / "closed"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(cluster_link, "OUTSIDE", scratch / "outside")
    return directory


def embedded_in(data_directory: Path) -> EmbeddedPostgres:
    """The server of a data directory, as a broker makes it."""
    private = data_directory / ".penstock"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    guard.watch_postgres(private.absolute() / "postgres")
    return EmbeddedPostgres(private / "postgres", home=private)


def copy(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    return target


@pytest.mark.usefixtures("working_directory")
def test_a_relative_data_directory_contains_the_database():
    server = embedded_in(Path("data"))
    assert server.start() == "created"
    server.stop("immediate")
    assert server.outside is None
    assert Path("data/.penstock/postgres/data/PG_VERSION").is_file()
    assert not Path("data/.penstock/postgres").is_symlink()
    assert mode(Path("data")) & stat.S_IXOTH
    assert mode(Path("data/.penstock")) == (0o710 if os.geteuid() == 0 else 0o700)


@pytest.mark.usefixtures("working_directory")
def test_a_copy_of_a_data_directory_has_its_own_database_and_does_not_stop_the_first():
    with ServeProcess(Path("data")) as broker, SyncClient(broker.url) as client:
        client.push("orders", {"id": 1})
        postmaster = EmbeddedPostgres(Path("data/.penstock/postgres")).pid()
        live = copy(Path("data"), Path("copied-while-running"))
        with ServeProcess(live) as second, SyncClient(second.url) as copied:
            copied.push("of-the-copy", {"id": 2})
            assert [m.data for m in copied.pop("orders", auto_ack=True)] == [{"id": 1}]
            assert EmbeddedPostgres(live / ".penstock/postgres").pid() not in (None, postmaster)
        assert EmbeddedPostgres(Path("data/.penstock/postgres")).pid() == postmaster
        assert [queue.name for queue in client.admin.queues()] == ["orders"]
        client.push("orders", {"id": 3})
    cold = copy(Path("data"), Path("copied-after-stop"))
    with ServeProcess(cold) as second, SyncClient(second.url) as copied:
        assert [m.data["id"] for m in copied.pop("orders", batch=9, auto_ack=True)] == [1, 3]
        with ServeProcess(Path("data")) as broker, SyncClient(broker.url) as client:
            assert second.stop() == 0
            assert [m.data["id"] for m in client.pop("orders", batch=9)] == [1, 3]


def test_a_copied_lock_file_does_not_name_the_database_of_the_copy(scratch):
    server = embedded_in(scratch / "data")
    server.start()
    try:
        copied = copy(scratch / "data", scratch / "copy")
        assert url_here(Config(data_directory=scratch / "data")) == server.url
        with pytest.raises(NotFound, match="no embedded database runs in"):
            url_here(Config(data_directory=copied))
        assert EmbeddedPostgres(copied / ".penstock/postgres").pid() is None
    finally:
        server.stop("immediate")


def test_a_data_directory_that_is_moved_while_its_server_runs_gets_no_second_server(scratch):
    server = embedded_in(scratch / "data")
    server.start()
    postmaster = server.pid()
    (scratch / "data").rename(scratch / "moved")
    moved = embedded_in(scratch / "moved")
    assert moved.pid() == postmaster
    assert moved.start() == "restarted"  # its socket was at the old place
    assert moved.pid() != postmaster
    assert rows(moved, "SELECT 1") == [(1,)]
    moved.stop("immediate")


@as_root
def test_a_data_directory_that_is_moved_keeps_its_database_outside(closed):
    server = embedded_in(closed / "data")
    server.start()
    postmaster = server.pid()
    (closed / "data").rename(closed / "moved")
    moved = embedded_in(closed / "moved")
    assert moved.start() == "taken over"
    assert moved.pid() == postmaster
    with pytest.raises(Unavailable, match="belongs to another data directory"):
        embedded_in(copy(closed / "moved", closed / "data")).start()
    moved.stop("immediate")


@as_root
def test_below_a_closed_directory_the_banner_says_where_the_database_is(closed):
    outside = cluster_link.OUTSIDE
    options = ["--data-dir", str(closed / "data"), "--set", "http_server.port=0"]
    options += ["--set", "tcp_server.port=0", "--set", "websocket_server.port=0"]
    options += ["--set", "kafka_server.port=0"]
    command = [sys.executable, "-c", SERVE, str(outside), "serve", *options]
    broker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    guard.watch(broker.pid)
    guard.watch_postgres(closed / "data/.penstock/postgres")
    banner = []
    assert broker.stdout is not None
    for line in broker.stdout:
        banner.append(line)
        if line.startswith("Try this"):
            break
    broker.send_signal(signal.SIGTERM)
    broker.stdout.read()
    assert broker.wait() == 0
    (cluster,) = outside.iterdir()
    assert f"in {cluster}, NOT in the data directory" in "".join(banner)


@as_root
def test_a_copied_link_is_refused_and_the_owner_of_the_database_is_not_disturbed(closed):
    server = embedded_in(closed / "data")
    server.start()
    assert server.outside is not None
    postmaster = server.pid()
    copied = copy(closed / "data", closed / "copy")
    other = embedded_in(copied)
    assert other.pid() is None
    other.stop("immediate")
    with pytest.raises(Unavailable, match="belongs to another data directory") as refused:
        other.start()
    with pytest.raises(NotFound, match="belongs to another data directory"):
        url_here(Config(data_directory=copied))
    assert server.pid() == postmaster
    server.stop("immediate")
    with pytest.raises(Unavailable, match="belongs to another data directory"):
        other.start()  # also when nothing runs
    # What the message says works: the copy starts empty, or replaces the first.
    replace = str(refused.value).rpartition("any more: ")[2]
    subprocess.run(replace, shell=True, check=True)
    assert other.start() == "started"
    other.stop("immediate")
    with pytest.raises(Unavailable, match="belongs to another data directory"):
        server.start()
    server.directory.unlink()
    assert server.start() == "created"
    assert server.outside != other.outside
    server.stop("immediate")


@as_root
def test_a_link_of_an_earlier_release_is_kept_and_a_copy_of_it_is_refused(closed):
    server = embedded_in(closed / "data")
    server.start()
    server.stop("immediate")
    assert server.outside is not None
    (server.outside / cluster_link.OWNER).unlink()
    other = embedded_in(copy(closed / "data", closed / "copy"))
    with pytest.raises(Unavailable, match="belongs to another data directory"):
        other.start()  # although it comes first
    assert server.start() == "started"
    server.stop("immediate")
    owner = (server.outside / cluster_link.OWNER).read_bytes()
    assert owner == b"%d %s\n" % (server.directory.lstat().st_ino, bytes(server.directory))


@as_root
def test_a_link_to_a_database_that_is_gone_is_named_and_never_replaced_by_an_empty_database(closed):
    server = embedded_in(closed / "data")
    server.start()
    server.stop("immediate")
    assert server.outside is not None
    shutil.rmtree(server.outside)
    with pytest.raises(
        Unavailable, match=rf"{server.directory} is a link .*not exist.*rm {server.directory}"
    ):
        server.start()
    server.directory.unlink()
    assert server.start() == "created"
    server.stop("immediate")
