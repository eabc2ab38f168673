"""Finishing or undoing a roll, a repair or a swap that a crash interrupted, before anything of the
topic is looked at.
"""

import contextlib
from collections.abc import Set
from pathlib import Path

import numpy as np

from penstock.io.fs import Fs
from penstock.log.layout import (
    BATCHES,
    DATA,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    SWAP_PREFIX,
    parse_batches,
    parse_checked,
    parse_sealed,
    sealed_name,
)
from penstock.log.recovery.directory import MAX_OFFSET, Orphan, TopicDirectory
from penstock.log.scan import record_at
from penstock.log.tier.manifest import supersede


def finish_interrupted(directory: TopicDirectory) -> None:
    for name in sorted(directory.names):
        if name.startswith(SWAP_PREFIX):
            finish_swap(directory.fs, directory.path, name)
    directory.names = set(directory.fs.list_dir(directory.path))
    _finish_switch(directory)
    for name in sorted(directory.names, reverse=True):  # the sidecar last, see `_switch_began`
        if name.endswith((".new", ".swap")):
            directory.fs.remove(directory.path / name)
            directory.names.discard(name)
    unrolled = unfinished_roll(directory.fs, directory.path, directory.names)
    with_data = {base for kind, base in directory.sealed_files() if kind == DATA}
    for kind, base in directory.sealed_files():
        if base in with_data:
            continue
        sealed = sealed_name(kind, base)
        if unrolled.get(kind) == sealed:
            directory.fs.rename(directory.path / sealed, directory.path / kind)
            directory.names.add(kind)
        else:
            orphan = directory.orphans.setdefault(base, Orphan(base))
            orphan.end = max(orphan.end, _end_of_orphan(directory, kind, sealed))
            orphan.names.append(sealed)
        directory.names.discard(sealed)


def _finish_switch(directory: TopicDirectory) -> None:
    """Give a new segment its name when the old one has lost its own: it may be the only one that
    holds what was answered (`Writer.switch`).
    """
    names = directory.names
    if f"{DATA}.new" not in names or not _switch_began(directory):
        return
    for kind in KINDS:
        if f"{kind}.new" in names:
            directory.fs.rename(directory.path / f"{kind}.new", directory.path / kind)
            names.discard(f"{kind}.new")
            names.add(kind)
    directory.fs.sync_dir(directory.path)


def _switch_began(directory: TopicDirectory) -> bool:
    """Whether the old data has its sealed name; or, when all of it is replaced, the new sidecar has
    its name and the new data, which is created after it and removed before it, has not.
    """
    names = directory.names
    if DATA not in names:
        return any(kind == DATA for kind, _ in directory.sealed_files())
    if f"{BATCHES}.new" in names or BATCHES not in names:
        return False
    rows, _ = parse_batches(directory.fs.read(directory.path / BATCHES))
    end = int(rows["end"][-1]) if len(rows) else 0
    return end == directory.fs.size(directory.path / f"{DATA}.new")


def unfinished_roll(fs: Fs, directory: Path, names: Set[str]) -> dict[str, str]:
    """Kinds of the active segment whose file a roll renamed before it was interrupted, and the
    names they have now.

    A roll renames the data last, so that data.log still begins at the base that the others are
    named after.
    """
    sealed = [parsed for parsed in map(parse_sealed, names) if parsed is not None]
    newest = max((base for _, base in sealed), default=-1)
    if newest < 0 or (DATA, newest) in sealed or DATA not in names:
        return {}
    with contextlib.closing(fs.open(directory / DATA, write=False)) as file:
        first, _ = record_at(file, 0, file.size)
    if first not in (-1, newest):
        return {}  # it begins elsewhere: the data of that segment is missing
    return {
        kind: sealed_name(kind, newest)
        for kind, base in sealed
        if base == newest and kind not in names
    }


def _end_of_orphan(directory: TopicDirectory, kind: str, name: str) -> int:
    """The offset after the last record that a file beside missing data names; 0: none."""
    data = directory.fs.read(directory.path / name)
    if kind == BATCHES:
        rows, good = parse_batches(data)
        ends = (rows["first"] + rows["count"])[good]
        return int(ends.max()) if len(ends) else 0
    offsets = np.frombuffer(data, INDEX_TYPE, len(data) // INDEX_SIZE)["offset"]
    rising = int(np.argmin(np.append(offsets[1:] > offsets[:-1], False))) if len(offsets) else 0
    return int(offsets[rising]) + 1 if len(offsets) and offsets[rising] < MAX_OFFSET else 0


def finish_swap(fs: Fs, directory: Path, marker: str) -> None:
    """Put a compacted segment in place of those it was made from; see `penstock.topics.compaction`.

    May be called again after it failed: what was done is not repeated.
    """
    bases = parse_checked(fs.read(directory / marker)) if fs.exists(directory / marker) else None
    if bases is not None:
        base, *merged = (int(part) for part in bases.split(","))
        supersede(fs, directory, (base, *merged))
        for kind in KINDS:
            swap = directory / f"{sealed_name(kind, base)}.swap"
            if fs.exists(swap):
                fs.rename(swap, directory / sealed_name(kind, base))
        for other in merged:
            for kind in KINDS:
                fs.remove(directory / sealed_name(kind, other))
        fs.sync_dir(directory)
    fs.remove(directory / marker)
    fs.sync_dir(directory)
