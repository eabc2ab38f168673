"""Finish or undo a roll, a repair or a swap that a crash interrupted. This is the first step of
recovery.
"""

import contextlib
from collections.abc import Set
from pathlib import Path

from penstock.io.fs import Fs
from penstock.log.format import SegmentFormat
from penstock.log.layout import DATA, SWAP_PREFIX, parse_checked, parse_sealed, sealed_name
from penstock.log.tier.manifest import supersede
from penstock.log.topic_directory import Orphan, TopicDirectory


def finish_interrupted(form: SegmentFormat, directory: TopicDirectory) -> None:
    for name in sorted(directory.names):
        if name.startswith(SWAP_PREFIX):
            finish_swap(form, directory.fs, directory.path, name)
    directory.names = set(directory.fs.list_dir(directory.path))
    _finish_switch(form, directory)
    for name in sorted(directory.names, reverse=True):  # the sidecar last, see `_switch_began`
        if name.endswith((".new", ".swap")):
            directory.fs.remove(directory.path / name)
            directory.names.discard(name)
    unrolled = unfinished_roll(form, directory.fs, directory.path, directory.names)
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
            content = directory.fs.read(directory.path / sealed)
            orphan.end = max(orphan.end, form.described_end(kind, content))
            orphan.names.append(sealed)
        directory.names.discard(sealed)


def _finish_switch(form: SegmentFormat, directory: TopicDirectory) -> None:
    """Give a new segment its name if the old one was renamed already: it may be the only one with
    acknowledged records (`SegmentWriter.switch`).
    """
    names = directory.names
    if f"{DATA}.new" not in names or not _switch_began(form, directory):
        return
    for kind in form.kinds:
        if f"{kind}.new" in names:
            directory.fs.rename(directory.path / f"{kind}.new", directory.path / kind)
            names.discard(f"{kind}.new")
            names.add(kind)
    directory.fs.sync_dir(directory.path)


def _switch_began(form: SegmentFormat, directory: TopicDirectory) -> bool:
    """Return whether a switch has begun to rename files.

    Either the old data has its sealed name. Or, if all of it is replaced, the first new file has
    its name but the new data has not, which is created after that file and removed before it.
    """
    names = directory.names
    if DATA not in names:
        return any(kind == DATA for kind, _ in directory.sealed_files())
    first = form.kinds[0]
    if f"{first}.new" in names or first not in names:
        return False
    size = form.described_size(first, directory.fs.read(directory.path / first))
    return size == directory.fs.size(directory.path / f"{DATA}.new")


def unfinished_roll(
    form: SegmentFormat, fs: Fs, directory: Path, names: Set[str]
) -> dict[str, str]:
    """Return the files of the active segment that an interrupted roll has renamed: their kinds and
    present names.

    A roll renames the data last, so data.log still begins at the base in the names of the others.
    """
    sealed = [parsed for parsed in map(parse_sealed, names) if parsed is not None]
    newest = max((base for _, base in sealed), default=-1)
    if newest < 0 or (DATA, newest) in sealed or DATA not in names:
        return {}
    with contextlib.closing(fs.open(directory / DATA, write=False)) as file:
        first = form.first_offset(file)
    if first not in (-1, newest):
        return {}  # it begins elsewhere: the data of that segment is missing
    return {
        kind: sealed_name(kind, newest)
        for kind, base in sealed
        if base == newest and kind not in names
    }


def finish_swap(form: SegmentFormat, fs: Fs, directory: Path, marker: str) -> None:
    """Replace segments by the compacted one made from them; see `penstock.topics.compaction`.

    May be called again after a failure: completed steps are not repeated.
    """
    bases = parse_checked(fs.read(directory / marker)) if fs.exists(directory / marker) else None
    if bases is not None:
        base, *merged = (int(part) for part in bases.split(","))
        supersede(fs, directory, (base, *merged))
        for kind in form.kinds:
            swap = directory / f"{sealed_name(kind, base)}.swap"
            if fs.exists(swap):
                fs.rename(swap, directory / sealed_name(kind, base))
        for other in merged:
            for kind in form.kinds:
                fs.remove(directory / sealed_name(kind, other))
        fs.sync_dir(directory)
    fs.remove(directory / marker)
    fs.sync_dir(directory)
