"""Finishing or undoing a roll or a swap that a crash interrupted, before anything of the topic is looked at."""

from pathlib import Path

from penstock.storage.fs import Fs
from penstock.topics.layout import DATA, KINDS, parse_checked, sealed_name
from penstock.topics.recovery.place import Place


def finish_interrupted(place: Place) -> None:
    for name in sorted(place.names):
        if name.startswith("swap-"):
            finish_swap(place.fs, place.directory, name)
    place.names = set(place.fs.list_dir(place.directory))
    for name in sorted(place.names):
        if name.endswith((".new", ".swap")):
            place.fs.remove(place.directory / name)
            place.names.discard(name)
    with_data = {base for kind, base in place.sealed_files() if kind == DATA}
    for kind, base in place.sealed_files():
        if base in with_data:
            continue
        if kind not in place.names:  # a roll renames the data last: it had not come to it
            place.fs.rename(place.directory / sealed_name(kind, base), place.directory / kind)
            place.names.add(kind)
        else:
            place.report("lost", f"{sealed_name(DATA, base)} is missing", file=sealed_name(DATA, base))
            place.fs.rename(
                place.directory / sealed_name(kind, base), place.directory / f"orphan-{sealed_name(kind, base)}"
            )
        place.names.discard(sealed_name(kind, base))


def finish_swap(fs: Fs, directory: Path, marker: str) -> None:
    """Put a compacted segment in place of those it was made from; see `penstock.topics.compaction`.

    May be called again after it failed: what was done is not repeated.
    """
    told = parse_checked(fs.read(directory / marker)) if fs.exists(directory / marker) else None
    if told is not None:
        base, *merged = (int(part) for part in told.split(","))
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
