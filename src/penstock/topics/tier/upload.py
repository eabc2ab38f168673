"""Uploading one sealed segment: its three files, read back and compared before anyone names them.

The names come from the content, so that an upload that was interrupted is begun again under the
same names, and what is there already and right is not sent twice.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from crc32c import crc32c

from penstock.errors import Damaged, NotFound, StorageFailed
from penstock.io.fs import File
from penstock.log.format import SegmentFormat
from penstock.log.layout import CLEAN, DATA, Checkpoint
from penstock.log.producers import Producers
from penstock.log.segment import Segment
from penstock.log.tier.manifest import (
    BLOCK_BYTES,
    StoredObject,
    StoredSegment,
    TieredFile,
    block_checksums,
)
from penstock.object_store import PART_BYTES, PARTS_IN_FLIGHT, ObjectStore

READ_BYTES = 1 << 20  # of what is written: larger buffers are had from the system each time
Ending = Callable[[], bool]  # the broker stops, or the topic was deleted: an upload is given up


def upload(store: ObjectStore, incarnation: str, segment: Segment, ending: Ending) -> StoredSegment:
    """Blocks, for as long as the store takes. `FileNotFoundError` when the segment is gone."""
    sizes = segment.sizes()
    # they stay open whatever happens to it
    files = {kind: segment.file(kind) for kind in segment.kinds}
    stored, crc = _checksums(files, sizes, ending)
    entry = StoredSegment(
        stem=f"{segment.base:020d}-{stored[DATA].size:x}-{crc:08x}",
        base=segment.base,
        end=segment.end,
        rows=segment.rows,
        newest=segment.newest,
        compacted=segment.compacted,
        files=stored,
    )
    targets = {kind: StoredObject.of(incarnation, entry, kind) for kind in segment.kinds}
    missing = {kind: one for kind, one in targets.items() if not _is_stored(store, one, ending)}
    for kind, target in missing.items():
        store.write(target.name, _parts(files[kind], stored[kind].size, ending, READ_BYTES))
    _check(store, missing.values(), ending)
    return entry


def _checksums(
    files: Mapping[str, File], sizes: Mapping[str, int], ending: Ending
) -> tuple[dict[str, TieredFile], int]:
    """Of each file by blocks, and of all the data."""
    crc = 0

    def summed(parts: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal crc
        for part in parts:
            crc = crc32c(part, crc)
            yield part

    stored = {}
    for kind, file in files.items():
        parts = _parts(file, sizes[kind], ending)
        stored[kind] = block_checksums(summed(parts) if kind == DATA else parts)
        if stored[kind].size != sizes[kind]:
            raise Damaged(f"{file.path.name} has {stored[kind].size} of {sizes[kind]} bytes")
    return stored, crc


def _parts(file: File, size: int, ending: Ending, part_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    for at in range(0, size, part_bytes):
        _refuse_ending(ending)
        yield file.read_at(at, min(part_bytes, size - at))


def _refuse_ending(ending: Ending) -> None:
    if ending():
        raise StorageFailed("the upload was given up: the broker stops, or the topic was deleted")


def _is_stored(store: ObjectStore, target: StoredObject, ending: Ending) -> bool:
    """Whether an upload that was interrupted came this far; a small file is rather sent again."""
    if target.file.size <= PART_BYTES or store.size_of(target.name) != target.file.size:
        return False
    try:
        _check(store, [target], ending)
    except (Damaged, NotFound):
        return False
    return True


def _check(store: ObjectStore, targets: Collection[StoredObject], ending: Ending) -> None:
    """Read them back; what a directory was given is made durable first."""
    store.sync([target.name for target in targets])

    def read(target: StoredObject, number: int) -> None:
        _refuse_ending(ending)
        target.read_block(store, number)

    blocks = [(target, number) for target in targets for number in range(target.count)]
    with ThreadPoolExecutor(min(PARTS_IN_FLIGHT, max(1, len(blocks))), "tier-check") as pool:
        for done in [pool.submit(read, *block) for block in blocks]:
            done.result()


def checkpoint_after(
    form: SegmentFormat,
    before: bytes,
    incarnation: str,
    segment: Segment,
    expiry: float,
    now: int,
) -> bytes:
    """The checkpoint of a topic that ends with this segment, whose producers are those of the
    checkpoint before and what the segment adds."""
    earlier = Checkpoint.parse(before) if before else None
    producers = Producers(earlier.producers if earlier is not None else {}, expiry)
    form.replay(producers, segment, None)
    producers.forget_before(now)
    return Checkpoint(
        bytes.fromhex(incarnation),
        next_offset=segment.end,
        base=segment.end,
        last_time=segment.newest,
        state=CLEAN,
        producers=producers.entries,
    ).pack()
