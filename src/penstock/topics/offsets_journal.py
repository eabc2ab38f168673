"""The committed offsets of consumer groups on disk: a journal, and a copy of its contents.

    <data_directory>/.penstock/groups/offsets.log    text, one line per event, the last one of a
                                                     group and topic counts
        <8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
        ["commit", group, topic, incarnation, offset]      ["delete", group, topic]
        ["noted", group, topic, incarnation, offset, text]     a commit with the text that a Kafka
                                                               client stored with it

A line that does not match its checksum is skipped and counted; the group then resumes from its
previous commit. The journal is replaced by a snapshot when it is several times as large as one, and
after any failed write.

    <data_directory>/.penstock/groups/offsets.copy   first this line, then a commit for each group
                                                     and topic at that time
        ["copy", size]                               the size of the journal, which never becomes
                                                     smaller

The copy is written when the broker starts and stops, and whenever the journal has doubled. A
journal that is missing, or smaller than the copy says, has lost commits. Then the groups resume
from the copy, and this is reported. They read some records again, but skip none.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from penstock.errors import StorageError, StorageFailed
from penstock.io.fs import Fs
from penstock.io.journal import SNAPSHOT_BYTES, SNAPSHOT_FACTOR, JournalFile, events, line, parse
from penstock.io.tasks import in_pool
from penstock.metrics import Counter

log = logging.getLogger("penstock.topics.groups")

JOURNAL, COPY = "offsets.log", "offsets.copy"
FIELDS = {"commit": 5, "noted": 6, "delete": 3}


class CommittedOffset(NamedTuple):
    group: str
    topic: str
    incarnation: str
    offset: int
    note: str = ""  # text that a Kafka client stored with it


class OffsetsJournal:
    """The journal. Runs on the event loop; pending lines share one write and one fsync in the pool.

    `damage` counts faults by outcome.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pool: Executor,
        fs: Fs,
        sync: bool,
        damage: Counter,
    ) -> None:
        self._directory = directory
        self._file = JournalFile(fs, directory / JOURNAL, sync=sync)
        self._pool = pool
        self._fs = fs
        self._sync = sync
        self._damage = damage
        # The contents of the journal, including pending lines; by group and topic.
        self.offsets: dict[tuple[str, str], CommittedOffset] = {}
        self._lines: list[bytes] = []  # pending
        self._waiting: list[asyncio.Future[None]] = []  # callers of `flush` for these lines
        self._writing: asyncio.Task[None] | None = None
        self._copied = 0  # size of the journal according to the copy; 0: there is no copy
        self._rewrite = False  # the journal cannot be trusted: replace it by a snapshot
        self.skipped = 0  # damaged lines at the start

    # Loading

    def load(self, recent_groups: Callable[[], list[str]]) -> None:
        """Read the journal and the copy. Blocks. `recent_groups` returns groups that have figures,
        to report lost offsets if both files are missing.
        """
        self._fs.make_dir(self._directory)
        path = self._directory / COPY
        journal, copy = self._file.read(), self._fs.read(path) if self._fs.exists(path) else None
        head, _, snapshot = (copy or b"").partition(b"\n")
        noted = parse(head)
        if isinstance(noted, list) and len(noted) == 2 and noted[0] == "copy":
            self._copied = int(noted[1])
        elif copy is not None:
            self.report("damaged", f"{COPY} is damaged and is recreated")
        if self._file.size < self._copied:
            self._replay(snapshot)
            what = (
                f"has {len(journal)} bytes, {self._copied} were written"
                if journal is not None
                else "is missing"
            )
            self.report(
                "restored",
                f"{JOURNAL} {what}: {len(self.offsets)} cursors of groups resume from {COPY} "
                "and may read records again",
            )
            self._rewrite = True
        elif journal is None and copy is None and (groups := recent_groups()):
            self.report(
                "lost",
                f"{JOURNAL} is missing: the committed offsets of {', '.join(groups)} are lost, "
                "so these groups start over",
            )
        self._replay(journal or b"")
        if self.skipped:
            self._rewrite = True
            self.report(
                "damaged",
                f"{JOURNAL}: {self.skipped} damaged lines were skipped; "
                "groups resume from earlier commits",
            )

    def report(self, outcome: str, text: str) -> None:
        log.warning("group offsets: %s: %s", outcome, text)
        self._damage.add(1, outcome)

    def _replay(self, data: bytes) -> None:
        said, damaged = events(data, FIELDS)
        self.skipped += damaged
        for kind, group, topic, *rest in said:
            if kind == "delete":
                self.offsets.pop((group, topic), None)
            else:
                self.offsets[group, topic] = CommittedOffset(group, topic, *rest)

    # Writing

    def commit(self, committed: CommittedOffset) -> None:
        """Queue a commit; `flush` waits until it is durable."""
        self.offsets[committed.group, committed.topic] = committed
        self._append(commit_line(committed))

    def delete(self, group: str, topic: str) -> None:
        """Queue the deletion of an offset; `flush` waits until it is durable."""
        self.offsets.pop((group, topic), None)
        self._append(line(["delete", group, topic]))

    def correct(self, committed: CommittedOffset) -> None:
        """Replace a wrong entry of the journal; `copy` writes it."""
        self.offsets[committed.group, committed.topic] = committed
        self._rewrite = True

    async def flush(self) -> None:
        """Wait until the lines that were just queued are durable. There must be some."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _append(self, text: bytes) -> None:
        self._lines.append(text)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._lines:
                lines, self._lines = self._lines, []
                waiting, self._waiting = self._waiting, []
                limit = max(SNAPSHOT_BYTES, SNAPSHOT_FACTOR * 128 * len(self.offsets))
                rewrite = self._rewrite or self._file.size > limit
                copy = rewrite or self._file.size >= 2 * self._copied
                snapshot = self._snapshot() if copy else b""
                failure: StorageError | None = None
                try:
                    await in_pool(self._pool, self._write_lines, b"".join(lines), snapshot, rewrite)
                    self._rewrite = self._rewrite and not rewrite
                except StorageError as error:
                    failure, self._rewrite = error, True
                    log.error("group offsets could not be written: %s", error)
                except BaseException:
                    _refuse(waiting, StorageFailed("group offsets could not be written"))
                    self._rewrite = True
                    raise
                if failure is not None:
                    _refuse(waiting, failure)
                for future in waiting:
                    if not future.done():
                        future.set_result(None)
        finally:
            self._writing = None

    def _snapshot(self) -> bytes:
        return b"".join(map(commit_line, self.offsets.values()))

    def _write_lines(self, lines: bytes, snapshot: bytes, rewrite: bool) -> None:
        """Append the lines. With `rewrite`, replace the journal by the snapshot, which has them."""
        if rewrite:
            self._write_copy(snapshot, min(len(snapshot), self._file.size or len(snapshot)))
            self._file.replace(snapshot)
            return
        self._file.append(lines)
        if snapshot:
            self._write_copy(snapshot, self._file.size)

    async def copy(self) -> None:
        """Write the copy if it is out of date; after damage, the journal as well."""
        if self._rewrite and self.offsets:
            self._append(b"")
            await self._drain()
        elif self._file.size != self._copied:
            await in_pool(self._pool, self._write_copy, self._snapshot(), self._file.size)

    def _write_copy(self, snapshot: bytes, size: int) -> None:
        try:
            self._fs.replace(
                self._directory / COPY, line(["copy", size]) + snapshot, sync=self._sync
            )
            self._copied = size
        except StorageError as error:
            log.warning("the copy of the group offsets could not be written: %s", error)

    async def _drain(self) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def stop(self) -> None:
        await self._drain()
        await self.copy()
        self._file.close()


def _refuse(waiting: Iterable[asyncio.Future[None]], failure: StorageError) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(type(failure)(str(failure)))


def commit_line(committed: CommittedOffset) -> bytes:
    """Return the line of a commit. Without a note, older brokers can read it."""
    if committed.note:
        return line(["noted", *committed])
    return line(["commit", *committed[:-1]])
