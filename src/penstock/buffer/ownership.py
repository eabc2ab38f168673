"""Own the files of this process, and adopt those of dead processes (files.py has the rules)."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from penstock.buffer import files
from penstock.buffer.backlog import BufferFile
from penstock.buffer.events import count_events
from penstock.buffer.failed import FailedEvents
from penstock.buffer.files import KINDS, Name, OwnerLock
from penstock.buffer.storage import BufferStorage
from penstock.errors import StorageFailed

log = logging.getLogger("penstock.buffer")


class BufferOwnership:
    """The tags whose files belong to this process. `begin` and `adopt` block."""

    def __init__(self, storage: BufferStorage, failed: FailedEvents) -> None:
        self._directory = storage.directory
        self._fs = storage.fs
        self._failed = failed
        self._namer = storage.namer
        self._locks: dict[str, OwnerLock] = {}  # by tag
        self._own = ""  # the tag of new files

    def begin(self) -> None:
        """Create the directory if necessary, and take a tag."""
        self._fs.make_dir(self._directory)
        lock = files.new_owner(self._directory)
        self._locks[lock.tag] = lock
        self._own = self._namer.tag = lock.tag

    def adopt(self) -> list[BufferFile]:
        """Adopt the files of processes that died; return them in the order of their replay."""
        entries = self._fs.list_dir(self._directory)
        tags = {name.tag for name in map(files.parse, entries) if name}
        tags |= {tag for tag in map(files.tag_of_lock, entries) if tag} | self._failed.tags()
        taken = set()
        for tag in tags - self._locks.keys():
            lock = OwnerLock(self._directory, tag)
            if lock.take():
                self._locks[tag] = lock
                taken.add(tag)
        if not taken:
            return []
        self._place_in_time(taken)
        self._failed.adopt(taken)
        # List again: until we had the lock, its owner may have created and renamed files.
        names = self._names(self._directory, taken)
        names.sort(key=lambda name: (KINDS.index(name.kind), name.id))
        adopted = [file for file in map(self._recovered, names) if file]
        self.release_unused(adopted, taken)
        return adopted

    def _place_in_time(self, tags: set[str]) -> None:
        """Rename Queen MQ's files so that they are replayed first (see files.py)."""
        named = [(self._directory, name) for name in self._names(self._directory, tags)]
        oldest = min((name.created_at for _, name in named if name.created_at), default=time.time())
        old = [(place, name) for place, name in named if not name.created_at]
        old += [(self._failed.directory, name) for name in self._failed.without_reasons(tags)]
        old.sort(key=lambda entry: (entry[1].replay_rank, entry[1].created_at, entry[1].id))
        first = int(oldest * 1000) - len(old)
        for number, (place, name) in enumerate(old):
            new = files.name_in_time(name.kind, name.tag, first + number)
            self._fs.rename(place / str(name), self._directory / str(new))
            log.info("Adopted %s of Queen MQ as %s", name, new)
        if old:
            self._fs.sync_dir(self._directory)

    def _names(self, directory: Path, tags: set[str]) -> list[Name]:
        names = map(files.parse, self._fs.list_dir(directory))
        return [name for name in names if name and name.tag in tags]

    def _recovered(self, name: Name) -> BufferFile | None:
        path = self._directory / str(name)
        file = BufferFile(name, path, size=self._fs.size(path), keys=None)
        if file.size == 0:
            self._fs.remove(path)
            return None
        try:
            file.events = count_events(self._fs, path)
            if name.active:
                file.complete(self._fs)
                log.info(
                    "Recovered %s of a process that ended without completing it: %d events",
                    *(file.name, file.events),
                )
        except StorageFailed as error:
            log.error("%s: the replay will try again", error)
        return file

    def release_unused(
        self, remaining: Iterable[BufferFile], among: Iterable[str] | None = None
    ) -> None:
        """Release the adopted tags (or those in `among`) that have no file left."""
        used = {file.name.tag for file in self._failed.files.values()}
        used |= {file.name.tag for file in remaining}
        for tag in list(self._locks if among is None else among):
            if tag not in used and tag != self._own:
                self._locks.pop(tag).release(remove=True)

    def release_all(self, remaining: Iterable[BufferFile]) -> None:
        """Release all tags. Another process adopts the remaining files."""
        self._own = ""
        self.release_unused(remaining)
        for lock in self._locks.values():
            lock.release(remove=False)
        self._locks.clear()
