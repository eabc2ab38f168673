"""Check the tier's objects against its manifests: read every block of every object.

Nothing is written, and the owner may keep running. If a manifest changes during the check, it is
read again.
"""

from collections.abc import Callable
from itertools import pairwise

import msgspec

from penstock.errors import Damaged, NotFound
from penstock.log.tier.manifest import (
    MANIFEST,
    StoredObject,
    StoredSegment,
    TierManifest,
    manifest_name,
    object_name,
)
from penstock.log.verify import Finding
from penstock.object_store import ObjectStore

MAX_ATTEMPTS = 3


class TierReport(msgspec.Struct, kw_only=True):
    """The result of verifying one topic."""

    topic: str
    incarnation: str
    first_offset: int = 0
    next_offset: int = 0
    segments: int = 0
    records: int = 0
    bytes: int = 0
    unnamed: int = 0  # objects that no manifest names: garbage, or an upload in progress
    missing: int = 0  # offsets of a shared topic without a record: compaction, a failover
    findings: list[Finding] = []

    @property
    def sound(self) -> bool:
        return not self.findings


def verify_tier(
    store: ObjectStore, names: set[str], progress: Callable[[int], None]
) -> list[TierReport]:
    """Verify these topics, or all. Call `progress` with the bytes of each block."""
    objects: dict[str, set[str]] = {}  # by incarnation
    for item in store.list("topics/"):
        objects.setdefault(item.name.split("/")[1], set()).add(item.name)
    reports = []
    for incarnation, present in sorted(objects.items()):
        report = _verify(store, incarnation, names, progress)
        if report is None:
            continue
        report.unnamed += len(present)
        reports.append(report)
    return sorted(reports, key=lambda report: report.topic)


def _verify(
    store: ObjectStore, incarnation: str, names: set[str], progress: Callable[[int], None]
) -> TierReport | None:
    name = manifest_name(incarnation)
    for attempt in range(MAX_ATTEMPTS):
        try:
            data, _ = store.get(name)
            manifest = TierManifest.parse(data, name)
        except NotFound:
            return None  # deleted, or not complete yet
        except Damaged as error:
            return TierReport(
                topic=incarnation,
                incarnation=incarnation,
                findings=[Finding(MANIFEST, 0, str(error))],
            )
        if names and manifest.name not in names:
            return None
        report = _check_manifest(store, manifest, progress)
        if report.sound or attempt == MAX_ATTEMPTS - 1 or store.get(name)[0] == data:
            return report
    return None


def _check_manifest(
    store: ObjectStore, manifest: TierManifest, progress: Callable[[int], None]
) -> TierReport:
    segments = manifest.segments
    report = TierReport(
        topic=manifest.name,
        incarnation=manifest.incarnation,
        first_offset=segments[0].base if segments else 0,
        next_offset=manifest.end,
        segments=len(segments),
        records=sum(segment.rows for segment in segments),
        bytes=manifest.size,
        unnamed=-1 - sum(len(segment.files) for segment in segments),
    )
    for one, other in pairwise(segments):
        if other.base < one.end:
            text = f"offset {other.base} is in two segments"
            report.findings.append(Finding(other.stem, 0, text))
    for segment in segments:
        _check_segment(store, manifest.incarnation, segment, report, progress)
    return report


def _check_segment(
    store: ObjectStore,
    incarnation: str,
    segment: StoredSegment,
    report: TierReport,
    progress: Callable[[int], None],
) -> None:
    for kind in segment.files:
        stored = StoredObject.of(incarnation, segment, kind)
        name = object_name(incarnation, segment.stem, kind)
        size = store.size_of(name)
        if size != stored.file.size:
            what = "is missing" if size is None else f"has {size} of {stored.file.size} bytes"
            report.findings.append(Finding(name, 0, what))
            continue
        for number in range(stored.count):
            try:
                progress(len(stored.read_block(store, number)))
            except (Damaged, NotFound) as error:
                position = number * stored.block_bytes
                report.findings.append(Finding(name, position, str(error)))
