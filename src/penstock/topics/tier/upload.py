"""Upload the files of a sealed segment, and read them back before the manifest names them.

The names derive from the content. So an interrupted upload is repeated under the same names, and
intact files in the store are not sent again.
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

READ_BYTES = 1 << 20  # per read while uploading; malloc maps larger buffers each time
Ending = Callable[[], bool]  # returns whether to abort: the broker stops, or the topic was deleted


def upload(store: ObjectStore, incarnation: str, segment: Segment, ending: Ending) -> StoredSegment:
    """Upload a segment. Blocks. Raises FileNotFoundError if the segment was deleted."""
    sizes = segment.sizes()
    # the files stay open if the segment is deleted
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
    """Return the block checksums of each file, and the checksum of the data."""
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
        raise StorageFailed("the upload was aborted: the broker stops, or the topic was deleted")


def _is_stored(store: ObjectStore, target: StoredObject, ending: Ending) -> bool:
    """Return whether an earlier upload has stored this file. Small files are sent again anyway."""
    if target.file.size <= PART_BYTES or store.size_of(target.name) != target.file.size:
        return False
    try:
        _check(store, [target], ending)
    except (Damaged, NotFound):
        return False
    return True


def _check(store: ObjectStore, targets: Collection[StoredObject], ending: Ending) -> None:
    """Make the files durable, if the store is a directory, and read them back."""
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
    """Return the checkpoint of a topic that ends with this segment. Its producers are those of the
    previous checkpoint and of the segment.
    """
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
