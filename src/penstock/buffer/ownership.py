"""The files of this process: its own, and those it inherits from processes that died (see files.py
for the rules).
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from penstock.buffer import files
from penstock.buffer.backlog import BufferFile
from penstock.buffer.failed import Failed
from penstock.buffer.files import KINDS, Name, Ownership
from penstock.buffer.reader import count_events
from penstock.errors import StorageFailed
from penstock.log.fs import Fs

log = logging.getLogger("penstock.buffer")


class Estate:
    """Which owners' files are ours. `found` and `adopt` block."""

    def __init__(self, directory: Path, fs: Fs, failed: Failed) -> None:
        self._directory, self._fs, self._failed = directory, fs, failed
        self._owned: dict[str, Ownership] = {}
        self._own = ""

    def found(self) -> str:
        """Make the directory if need be and become an owner; the tag of our own files."""
        self._fs.make_dir(self._directory)
        ownership = files.new_ownership(self._directory)
        self._owned[ownership.tag] = ownership
        self._own = ownership.tag
        return ownership.tag

    def adopt(self) -> list[BufferFile]:
        """The files of processes that died since the last look, in the order of their replay."""
        there = self._fs.list_dir(self._directory)
        tags = {name.tag for name in map(files.parse, there) if name}
        tags |= {tag for tag in map(files.tag_of_lock, there) if tag} | self._failed.tags()
        taken = set()
        for tag in tags - self._owned.keys():
            ownership = Ownership(self._directory, tag)
            if ownership.take():
                self._owned[tag] = ownership
                taken.add(tag)
        if not taken:
            return []
        self._failed.adopt(taken)
        # Listed again: until the lock was ours, its owner may have made, renamed and deleted files.
        names = [
            name
            for name in map(files.parse, self._fs.list_dir(self._directory))
            if name and name.tag in taken
        ]
        names.sort(key=lambda name: (KINDS.index(name.kind), name.id))
        found = [file for file in map(self._recovered, names) if file]
        self.let_go(found, taken)
        return found

    def _recovered(self, name: Name) -> BufferFile | None:
        path = self._directory / str(name)
        size = self._fs.size(path)
        if size == 0:
            self._fs.remove(path)
            return None
        events = 0
        try:
            events = count_events(self._fs, path)
            if name.active:
                complete = self._directory / str(name.complete)
                self._fs.rename(path, complete)
                name, path = name.complete, complete
                log.info(
                    "Recovered %s of a process that ended without completing it: %d events",
                    name,
                    events,
                )
        except StorageFailed as error:
            log.error("%s: replay will try again", error)
        return BufferFile(name, path, events, size, keys=None)

    def let_go(self, left: Iterable[BufferFile], among: Iterable[str] | None = None) -> None:
        """Give up the tags of the dead (or those `among` them) that have no file left."""
        used = self._used(left)
        for tag in list(self._owned if among is None else among):
            if tag not in used and tag != self._own:
                self._owned.pop(tag).release(remove=True)

    def leave(self, left: Iterable[BufferFile]) -> None:
        """Give up everything: whoever comes next adopts what is left."""
        used = self._used(left)
        for tag, ownership in self._owned.items():
            ownership.release(remove=tag not in used)
        self._owned.clear()

    def _used(self, left: Iterable[BufferFile]) -> set[str]:
        return {file.name.tag for file in left} | {
            file.name.tag for file in self._failed.files.values()
        }
