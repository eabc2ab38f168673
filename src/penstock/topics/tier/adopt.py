"""Adopt a tier: build a data directory from what the last owner uploaded.

Each topic is built in a staging directory, with the manifest as its `tier.json` and an empty active
segment, and renamed into place. Then topics are opened as usual. An interrupted adoption resumes.

The lost machine had records that were not in the tier yet. Their offsets follow from its last
state, and are reported as lost. The machine may have assigned more offsets after that state. A
reader that has seen those would miss new records with the same offsets. Therefore, unless the last
state is that of a clean stop, adoption skips more offsets than a broker can assign in the time
since that state, by the store's clock.

    <data_directory>/.penstock/topic-tier/
        adopting/       topics that are being built
        adopted.json    the report; it is written last
"""

import json
import logging
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import Conflict, Damaged, NotFound
from penstock.io.fs import DISK
from penstock.log.formats import FORMATS
from penstock.log.layout import (
    ARCHIVED,
    CHECKPOINT,
    CLEAN,
    DAMAGE,
    DATA,
    DELETE,
    INCARNATION,
    LIMITS,
    LOGS,
    POLICY,
    PRIVATE,
    TIER,
    Checkpoint,
    pack_checked,
)
from penstock.log.tier.manifest import MANIFEST, TierManifest, manifest_name
from penstock.object_store import ObjectStore
from penstock.protocol.names import is_topic_name, split_label
from penstock.topics.offsets_journal import JOURNAL as OFFSETS
from penstock.topics.offsets_journal import commit_line
from penstock.topics.tier.owner import OWNER, STATE, Ownership, TierState
from penstock.topics.write_claims import JOURNAL as SINKS

log = logging.getLogger("penstock.topics.tier")

OFFSETS_PER_SECOND = 1 << 20  # more than one topic can assign; also the least to skip
UNKNOWN_SECONDS = 30 * 86_400  # assumed age of a missing state
MAX_ATTEMPTS = 5
ADOPTED, STAGING = "adopted.json", "adopting"


class AdoptedTopic(msgspec.Struct, kw_only=True):
    topic: str
    incarnation: str
    first_offset: int
    end: int  # the offset after the last record in the tier
    next_offset: int  # of the next record
    # Offsets that the lost machine assigned and the tier lacks; equal: none are known.
    lost_from: int
    lost_to: int


class AdoptReport(msgspec.Struct, kw_only=True):
    """The topics and groups that an adoption restored, and what it could not restore."""

    address: str
    adopted_at: str
    state_at: str | None  # time of the lost machine's last state
    clean: bool  # the machine had stopped cleanly: this report is complete
    owner_before: str
    topics: list[AdoptedTopic] = []
    groups: int = 0
    problems: list[str] = []  # what could not be read

    def text(self) -> list[str]:
        what = f"{len(self.topics)} topics and {self.groups} offsets of groups"
        lines = [f"{what} from {self.address}, last written by {self.owner_before}"]
        lines += [
            f"topic {one.topic}: offsets {one.lost_from} to {one.lost_to - 1} were only on the "
            "lost machine"
            for one in self.topics
            if one.lost_from < one.lost_to
        ]
        if self.state_at is None:
            lines.append(
                "the tier has no state: groups start over, and it is unknown how much was only on "
                "the lost machine"
            )
        elif not self.clean:
            lines.append(
                f"records and commits after {self.state_at} on the lost machine are not known"
            )
        return lines + self.problems


class Adoption:
    """An adoption; its methods block. `directory` is `.penstock/topic-tier`."""

    def __init__(
        self, store: ObjectStore, data: Path, directory: Path, ownership: Ownership
    ) -> None:
        self._store = store
        self._data = data
        self._directory = directory
        self._staging = directory / STAGING
        self._ownership = ownership
        self._problems: list[str] = []
        self._skipped = 0  # offsets to skip in each topic

    def run(self) -> AdoptReport | None:
        """Adopt the tier. Return None if there is nothing to adopt or it was done before."""
        if DISK.exists(self._directory / ADOPTED):
            return None
        if not DISK.exists(self._staging):
            if DISK.exists(self._directory / OWNER) or self._has_topics():
                log.warning(
                    "topics.adopt: %s is not empty, nothing is adopted from %s",
                    self._data,
                    self._store.address,
                )
                return None
            if self._store.size_of(OWNER) is None:
                log.info("topics.adopt: %s is empty", self._store.address)
                return None
        DISK.make_dir(self._staging)
        DISK.sync_dir(self._directory)
        owner = self._ownership.take_over()
        state = self._read_state()
        if state is None or not state.clean:
            self._skipped = OFFSETS_PER_SECOND * (1 + self._seconds_since_state())
        report = AdoptReport(
            address=self._store.address,
            adopted_at=_time(datetime.now(UTC).timestamp()),
            state_at=_time(state.written_at) if state is not None else None,
            clean=state is not None and state.clean,
            owner_before=f"broker {owner.broker} on {owner.host}" if owner else "nobody",
        )
        for manifest in self._manifests(state):
            report.topics.append(self._adopt_topic(manifest, state))
        if state is not None:
            self._write_groups(state)
            report.groups = len(state.groups)
        report.problems = self._problems
        DISK.replace(self._directory / ADOPTED, msgspec.json.format(msgspec.json.encode(report)))
        shutil.rmtree(self._staging)
        for text in report.text():
            log.warning("adopted: %s", text)
        return report

    def _has_topics(self) -> bool:
        places = (self._data, self._data / PRIVATE / LOGS)
        return any(
            is_topic_name(name) and DISK.is_dir(place / name)
            for place in places
            for name in DISK.list_dir(place)
        )

    def _read_state(self) -> TierState | None:
        try:
            return TierState.parse(self._store.get(STATE)[0])
        except NotFound:
            return None
        except Damaged as error:
            self._problems.append(str(error))
            return None

    def _seconds_since_state(self) -> int:
        written, now = self._store.modified(STATE), self._store.modified(OWNER)
        if written is None or now is None:
            return UNKNOWN_SECONDS
        return max(0, round((now - written).total_seconds()))

    def _manifests(self, state: TierState | None) -> list[TierManifest]:
        """Take over and return one manifest per topic, also for topics without segments. Of two
        with the same name, the older topic was being deleted."""
        manifests: dict[str, TierManifest] = {}
        for item in self._store.list("topics/"):
            if not item.name.endswith("/" + MANIFEST):
                continue
            try:
                manifest = self._claim(item.name)
            except Damaged as error:
                self._problems.append(f"a topic is left out: {error}")
                continue
            _choose(manifests, manifest)
        for incarnation, end in (state.topics if state is not None else {}).items():
            empty = TierManifest(
                tier=self._ownership.tier, name=end.name, incarnation=incarnation, policy=DELETE
            )
            try:
                empty.check_names(STATE)
            except Damaged as error:
                self._problems.append(f"a topic is left out: {error}")
                continue
            _choose(manifests, empty)
        return [manifests[name] for name in sorted(manifests)]

    def _claim(self, name: str) -> TierManifest:
        for _ in range(MAX_ATTEMPTS):
            data, version = self._store.get(name)
            manifest = TierManifest.parse(data, name)
            if manifest_name(manifest.incarnation) != name:
                raise Damaged(f"{name} is the manifest of another topic: {manifest.incarnation}")
            manifest.broker = self._ownership.broker
            manifest.version += 1
            try:
                self._store.put_if(name, manifest.pack(), version)
            except Conflict:  # the previous owner wrote it concurrently
                continue
            return manifest
        raise Conflict(f"{self._store.address}/{name} changes faster than it can be taken over")

    def _adopt_topic(self, manifest: TierManifest, state: TierState | None) -> AdoptedTopic:
        end = manifest.end
        progress = state.topics.get(manifest.incarnation) if state is not None else None
        given = max(end, progress.next_offset if progress is not None else 0)
        following = given + self._skipped
        self._write_topic(manifest, given, following)
        return AdoptedTopic(
            topic=manifest.name,
            incarnation=manifest.incarnation,
            first_offset=manifest.segments[0].base if manifest.segments else following,
            end=end,
            next_offset=following,
            lost_from=end,
            lost_to=given,
        )

    def _write_topic(self, manifest: TierManifest, given: int, following: int) -> None:
        form = FORMATS[manifest.layout]
        target = self._data / manifest.name
        if form.keyed:
            topic, partition = split_label(manifest.name)
            target = self._data / PRIVATE / LOGS / topic / str(partition)
            DISK.make_dir(target.parent)
        if DISK.exists(target / INCARNATION):  # built before an interruption
            if manifest.segments:
                DISK.replace(target / TIER, manifest.pack())
            return
        staged = self._staging / manifest.incarnation
        DISK.remove_tree(staged)
        DISK.make_dir(staged)
        incarnation = bytes.fromhex(manifest.incarnation)
        checkpoint = Checkpoint.parse(manifest.checkpoint) or Checkpoint(incarnation)
        checkpoint.next_offset = checkpoint.base = following
        checkpoint.state = CLEAN
        damage: list[dict[str, Any]] = list(manifest.damage)
        if manifest.end < given:
            text = f"offsets {manifest.end} to {given - 1} were only on the lost machine"
            damage.append(
                {
                    "outcome": "lost",
                    "what": text,
                    "file": DATA,
                    "lost_from": manifest.end,
                    "lost_to": given,
                }
            )
        if given < following:
            text = f"offsets {given} to {following - 1} were left out: readers may have seen others"
            damage.append({"outcome": "skipped", "what": text, "skipped": following - given})
        empty = form.new_segment(DISK, staged, following, sealed=False)
        files = {
            **dict.fromkeys(form.kinds, b""),
            **form.companions(empty, empty.mark()),
            INCARNATION: pack_checked(manifest.incarnation),
            CHECKPOINT: checkpoint.pack(),
            POLICY: pack_checked(manifest.policy),
            LIMITS: manifest.limits.pack(),
        }
        if manifest.segments:
            files[TIER] = manifest.pack()
        if manifest.archived is not None:
            files[ARCHIVED] = pack_checked(str(manifest.archived))
        if damage:
            files[DAMAGE] = json.dumps(damage, indent=1).encode() + b"\n"
        for name, content in files.items():
            DISK.replace(staged / name, content)
        DISK.sync_dir(staged)
        DISK.rename(staged, target)
        DISK.sync_dir(target.parent)

    def _write_groups(self, state: TierState) -> None:
        directory = self._directory.parent / "groups"
        DISK.make_dir(directory)
        offsets = b"".join(commit_line(committed) for committed in state.groups)
        DISK.replace(directory / OFFSETS, offsets)
        DISK.replace(directory / SINKS, state.sinks)


def read_report(directory: Path) -> dict[str, Any] | None:
    """Return the report of an adoption; None if there was none."""
    try:
        report: dict[str, Any] = msgspec.json.decode(DISK.read(directory / ADOPTED))
    except FileNotFoundError:
        return None
    return report


def _choose(manifests: dict[str, TierManifest], manifest: TierManifest) -> None:
    other = manifests.get(manifest.name)
    if other is None or other.incarnation < manifest.incarnation:  # they sort by creation time
        manifests[manifest.name] = manifest


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
