"""Recover a topic from its directory: its segments, small files and producers."""

import logging
from pathlib import Path
from typing import NamedTuple

from penstock.errors import Damaged
from penstock.io.fs import Fs
from penstock.log.context import Context
from penstock.log.damage import DamageReport
from penstock.log.format import SegmentFormat
from penstock.log.layout import (
    ARCHIVED,
    BATCHES,
    CHECKPOINT,
    CLEAN,
    COMPACT,
    DAMAGE,
    DATA,
    DELETE,
    INCARNATION,
    LIMITS,
    POLICY,
    TIER,
    Checkpoint,
    label_of,
    pack_checked,
    parse_checked,
    sealed_name,
)
from penstock.log.limits import KEEP_ALL, TopicLimits
from penstock.log.producers import Producers
from penstock.log.recovery.interrupted import finish_interrupted
from penstock.log.segment import Segment
from penstock.log.tier.manifest import TierManifest
from penstock.log.tier.segment import not_local, put_in_tier
from penstock.log.topic_directory import TopicDirectory
from penstock.protocol.ids import uuid7
from penstock.protocol.names import is_incarnation

log = logging.getLogger("penstock.topics")


class RecoveredTopic(NamedTuple):
    """The state of a topic on disk after recovery."""

    format: SegmentFormat
    incarnation: str
    incarnation_lost: bool  # a new one replaces it
    segments: tuple[Segment, ...]  # in order of offsets, the active one last
    producers: Producers
    checkpointed: int  # size of the active segment's data at the checkpoint; -1: none
    state: int  # in that checkpoint
    archived: int | None
    policy: str  # delete or compact
    limits: TopicLimits
    damage: DamageReport
    tier: TierManifest | None  # lists the segments in the tier


def create_files(form: SegmentFormat, fs: Fs, directory: Path, state: int, *, sync: bool) -> None:
    """Create an empty topic. Its incarnation distinguishes it from earlier topics of this name."""
    fs.make_dir(directory)
    incarnation = uuid7()
    for kind in form.kinds:
        fs.open(directory / kind, create=True).close()
    empty = form.new_segment(fs, directory, 0, sealed=False)
    for name, data in form.companions(empty, empty.mark()).items():
        fs.replace(directory / name, data, sync=False)
    fs.replace(directory / INCARNATION, pack_checked(incarnation.hex), sync=sync)
    fs.replace(
        directory / CHECKPOINT,
        Checkpoint(incarnation.bytes, state=state).pack(),
        sync=sync,
    )
    if sync:
        fs.sync_dir(directory)
        fs.sync_dir(directory.parent)


def recover(form: SegmentFormat, context: Context, path: Path) -> RecoveredTopic:
    directory = TopicDirectory(context, path)
    damage = directory.damage
    if DAMAGE in directory.names:
        damage.read()
    finish_interrupted(form, directory)
    tier = _read_tier(form, directory)
    checkpoint = _read_checkpoint(directory)
    incarnation, incarnation_lost = _read_incarnation(directory, checkpoint)
    bases = sorted(base for kind, base in directory.sealed_files() if kind == DATA)
    proven = form.proven_base(directory, bases, checkpoint)
    limits: list[int | None] = [*bases[1:], proven]
    segments = [
        form.open_sealed(directory, base, limit) for base, limit in zip(bases, limits, strict=False)
    ]
    last = form.open_active(directory, segments, checkpoint, proven)
    scanned = last.open()
    segments += last.skip_lost()
    active = segments[-1]
    _report_orphans(directory, segments)
    damage.note_gaps(segments)
    producers = _producers(form, directory, segments, checkpoint)
    if tier is not None:
        segments = _with_tiered(form, directory, tier, segments, incarnation)
    same = checkpoint is not None and checkpoint.base == active.base and not scanned
    damage.write()
    for orphan in directory.orphans.values():
        for name in orphan.names:
            directory.fs.rename(directory.path / name, directory.path / f"orphan-{name}")
    for segment in segments:
        segment.forget_files()
    return RecoveredTopic(
        format=form,
        incarnation=incarnation,
        incarnation_lost=incarnation_lost,
        segments=tuple(segments),
        producers=producers,
        checkpointed=checkpoint.data_size if checkpoint is not None and same else -1,
        state=checkpoint.state if checkpoint is not None else CLEAN,
        archived=_read_archived(directory),
        policy=_read_policy(directory),
        limits=_read_limits(directory),
        damage=damage,
        tier=tier,
    )


def _read_tier(form: SegmentFormat, directory: TopicDirectory) -> TierManifest | None:
    if (data := directory.read(TIER)) is None:
        return None
    try:
        tier = TierManifest.parse(data, TIER)
    except Damaged as error:
        directory.report("damaged", f"{error}: the manifest is read from the tier again")
        return None
    # A crash can interrupt the removal of a segment's files. Remove the remaining ones; the tier
    # has the segment.
    for segment in tier.segments:
        names = {sealed_name(kind, segment.base) for kind in form.kinds}
        if not names <= directory.names and sealed_name(DATA, segment.base) in directory.names:
            for name in names:
                directory.fs.remove(directory.path / name)
            directory.names -= names
    return tier


def _with_tiered(
    form: SegmentFormat,
    directory: TopicDirectory,
    tier: TierManifest,
    segments: list[Segment],
    incarnation: str,
) -> list[Segment]:
    cache = directory.context.cache
    absent = not_local(tier, segments)
    if absent and cache is None:
        log.warning(
            "topic %s: offsets %d to %d are in a tier, but topics.tier is not set: they cannot "
            "be read",
            label_of(directory.path),
            absent[0].base,
            absent[-1].end - 1,
        )
    if cache is None or tier.incarnation != incarnation:
        return segments
    *sealed, active = segments
    for one in absent:
        holes = directory.damage.holes_of(one.base)
        blank = form.new_segment(directory.fs, directory.path, one.base, sealed=True)
        sealed.append(put_in_tier(blank, incarnation, one, cache, holes))
    return [*sorted(sealed, key=lambda segment: segment.base), active]


def _report_orphans(directory: TopicDirectory, segments: list[Segment]) -> None:
    for base in sorted(directory.orphans):
        end = next(
            segment.base for segment in segments if segment.base > base or segment is segments[-1]
        )
        name = sealed_name(DATA, base)
        directory.damage.report_lost(
            f"{name} is missing: offsets {base} to {end - 1}", name, base, end
        )


def _read_checkpoint(directory: TopicDirectory) -> Checkpoint | None:
    data = directory.read(CHECKPOINT)
    checkpoint = Checkpoint.parse(data or b"")
    if checkpoint is None and (data is not None or INCARNATION in directory.names):
        what = "is missing" if data is None else "is damaged"
        directory.report("repaired", f"{CHECKPOINT} {what}, the active segment is scanned whole")
    return checkpoint


def _read_incarnation(directory: TopicDirectory, checkpoint: Checkpoint | None) -> tuple[str, bool]:
    """Return the incarnation, and whether a new one replaces a lost one."""
    data = directory.read(INCARNATION)
    text = parse_checked(data or b"")
    if text is not None and is_incarnation(text):
        return text, False
    ours = (
        checkpoint is not None
        or bool(directory.names & {INCARNATION, BATCHES})
        or bool(directory.sealed_files())
    )
    lost = ours and checkpoint is None
    if ours:
        what = "is missing" if data is None else "is damaged"
        more = f", and {CHECKPOINT} does not have it: the topic gets a new one" if lost else ""
        directory.report("lost" if lost else "repaired", f"{INCARNATION} {what}{more}")
    text = checkpoint.incarnation.hex() if checkpoint is not None else uuid7().hex
    directory.fs.replace(
        directory.path / INCARNATION, pack_checked(text), sync=directory.context.durable
    )
    return text, lost


def _read_archived(directory: TopicDirectory) -> int | None:
    if (data := directory.read(ARCHIVED)) is None:
        return None
    text = parse_checked(data)
    if text is None or not text.isdigit():
        directory.report(
            "repaired", f"{ARCHIVED} is damaged: nothing is deleted before it is archived again"
        )
        return 0
    return int(text)


def _read_policy(directory: TopicDirectory) -> str:
    if (data := directory.read(POLICY)) is None:
        return DELETE
    text = parse_checked(data)
    if text not in (DELETE, COMPACT):
        directory.report(
            "repaired",
            f"{POLICY} is damaged: {COMPACT!r} is used, so retention deletes nothing",
        )
        return COMPACT
    return text


def _read_limits(directory: TopicDirectory) -> TopicLimits:
    if (data := directory.read(LIMITS)) is None:
        return TopicLimits()
    if (limits := TopicLimits.parse(data)) is None:
        directory.report(
            "repaired", f"{LIMITS} is damaged: retention deletes nothing until it is set again"
        )
        return KEEP_ALL
    return limits


def _producers(
    form: SegmentFormat,
    directory: TopicDirectory,
    segments: list[Segment],
    checkpoint: Checkpoint | None,
) -> Producers:
    producers = Producers(
        checkpoint.producers if checkpoint is not None else {},
        directory.context.settings.producer_expiry,
    )
    for segment in segments:
        if checkpoint is not None and segment.base < checkpoint.base:
            continue
        here = checkpoint is not None and segment.base == checkpoint.base
        form.replay(producers, segment, checkpoint if here else None)
    producers.forget_before(directory.context.now())
    return producers
