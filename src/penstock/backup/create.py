"""Take a backup. The docstring of the package explains the order of the steps."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.backup import manifest
from penstock.backup.dump import Dump
from penstock.backup.manifest import BackupManifest, Meter, Progress
from penstock.backup.open_files import LiveFiles, OpenFile, TopicSnapshot, open_topic
from penstock.config.database_url import EMBEDDED, url_here
from penstock.config.load import Loaded, show
from penstock.errors import Conflict
from penstock.export.sendqueue import JOURNAL, META
from penstock.io.fs import raise_file_limit
from penstock.log.layout import DATA, LOGS, TIER, find_logs, has_batches, sealed_name
from penstock.log.tier.manifest import StoredObject
from penstock.log.tier.manifest import TierManifest as Stored
from penstock.object_store import ObjectStore
from penstock.topics.store import TRASH, UNFINISHED
from penstock.topics.tier.tier import CACHE as TIER_CACHE
from penstock.topics.tier.tier import DIRECTORY as TIER_DIRECTORY

COPIES = 4  # concurrent copies
OF_TOPICS = (LOGS, TRASH, UNFINISHED)  # copied topic by topic, or not at all


def create(
    loaded: Loaded,
    place: ObjectStore,
    *,
    programs: Path | None = None,
    progress: Progress | None = None,
    tier: bool = False,
) -> BackupManifest:
    """Copy all data of the broker with this configuration, which may be running.

    `tier` also copies records that are only in object storage. Without it, the backup refers to
    them.
    """
    if manifest.NAME in place.names():
        raise Conflict(f"{place.address} already has a backup: name an empty location")
    raise_file_limit()  # all files of a topic are open at once
    backup = _Backup(loaded, place, programs, progress)
    topics = loaded.config.topics
    if tier and topics.tier:
        backup.tier = ObjectStore(topics.tier, create=False)
    if tier and topics.shared_tier:
        backup.shared_tier = ObjectStore(topics.shared_tier, create=False)
    return backup.run()


class _Backup:
    def __init__(
        self, loaded: Loaded, place: ObjectStore, programs: Path | None, progress: Progress | None
    ) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._place = place
        self._programs = programs
        self._meter = Meter(progress)
        self._manifest = BackupManifest(__version__, _now())
        self.tier: ObjectStore | None = None  # if set, copy the segments that are only there
        self.shared_tier: ObjectStore | None = None  # if set, copy the objects of shared topics

    def run(self) -> BackupManifest:
        config = self._config
        private = config.private_directory
        elsewhere = frozenset(
            {EMBEDDED, "buffers", "routes", TIER_DIRECTORY, TIER_CACHE, *OF_TOPICS}
        )
        with ExitStack() as stack:
            self._copy("buffers", stack.enter_context(LiveFiles(config.buffers_directory)).files)
            # The metadata of send queues is only a hint.
            sending = stack.enter_context(LiveFiles(config.routes_directory, frozenset({META})))
            journals = {
                name: b"".join(file.parts())
                for name, file in sending.files.items()
                if name.endswith(JOURNAL)
            }
            schema = config.database.db_schema
            database = stack.enter_context(Dump(url_here(config), schema, self._programs))
            self._write("queues.dump", database.parts())
            self._manifest.database_schema = schema
            sending.extend()
            for name, content in journals.items():
                self._write(f"routes/{name}", [content])
            self._copy(
                "routes", {n: f for n, f in sending.files.items() if not n.endswith(JOURNAL)}
            )
            self._copy("private", stack.enter_context(LiveFiles(private, elsewhere)).files)
            self._copy_shared(database.objects)
        if config.topics.enabled and config.data_directory.exists():
            for label, directory in find_logs(config.data_directory).items():
                self._copy_topic(label, directory)
        self._write("configuration.json", [msgspec.json.encode(_shown(self._loaded))])
        self._place.sync()
        self._manifest.ended_at = _now()
        self._manifest.files = self._meter.files
        self._place.write(manifest.NAME, [self._manifest.pack()])
        self._place.sync()
        return self._manifest

    def _copy_topic(self, label: str, directory: Path) -> None:
        snapshot = open_topic(directory)
        if snapshot is None:
            return
        target = f"topics/{label}"
        if has_batches(directory):
            target = "/".join(("private", LOGS, directory.parent.name, directory.name))
        with snapshot:
            self._copy_tiered(snapshot, target)
            for name, content in snapshot.small.items():
                self._write(f"{target}/{name}", [content])
            self._copy(target, snapshot.files)
            self._manifest.topics[label] = snapshot.next_offset

    def _copy_tiered(self, snapshot: TopicSnapshot, target: str) -> None:
        """Copy segments that are only in the tier, or record that they stay there."""
        if TIER not in snapshot.small:
            return
        stored = Stored.parse(snapshot.small[TIER], TIER)
        absent = [
            one
            for one in stored.segments
            if not one.superseded and sealed_name(DATA, one.base) not in snapshot.files
        ]
        if self.tier is None:
            if absent:
                self._manifest.tier = self._config.topics.tier
            return
        for one in absent:
            for kind in one.files:
                blocks = StoredObject.of(stored.incarnation, one, kind).blocks(self.tier)
                self._write(f"{target}/{sealed_name(kind, one.base)}", blocks)
        del snapshot.small[TIER]  # the backup has all segments

    def _copy_shared(self, objects: list[str]) -> None:
        """Copy the objects that rows of shared topics refer to, or record that they stay there."""
        if self.shared_tier is None:
            if objects:
                self._manifest.shared_tier = self._config.topics.shared_tier
            return
        self._write_all({name: self.shared_tier.read(name) for name in objects})

    def _copy(self, prefix: str, files: dict[str, OpenFile]) -> None:
        self._meter.expected += sum(file.size for file in files.values())
        self._write_all({f"{prefix}/{name}": file.parts() for name, file in files.items()})

    def _write_all(self, files: Mapping[str, Iterable[bytes]]) -> None:
        with ThreadPoolExecutor(COPIES) as pool:
            for copy in [pool.submit(self._write, *file) for file in files.items()]:
                copy.result()

    def _write(self, name: str, parts: Iterable[bytes]) -> None:
        self._place.write(name, self._meter.measured(name, parts))


def _shown(loaded: Loaded) -> dict[str, str]:
    """Return the settings that differ from the defaults, without passwords and tokens."""
    return {name: value for name, value, origin in show(loaded) if origin != "default"}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
