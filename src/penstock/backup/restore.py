"""Restore a backup into an empty target, or verify it."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from penstock.backup import dump, manifest
from penstock.backup.manifest import BackupManifest, Meter, Progress
from penstock.broker import RESTORING
from penstock.config import Config
from penstock.config.database_url import EMBEDDED, url_of
from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import ConfigError, Conflict, Damaged, NotFound
from penstock.io.fs import DISK
from penstock.log.layout import LOGS
from penstock.log.verify import verify
from penstock.object_store import ObjectStore
from penstock.protocol.names import LOST_FOUND, split_label


def read_manifest(place: ObjectStore) -> BackupManifest:
    try:
        return BackupManifest.parse(b"".join(place.read(manifest.NAME)))
    except NotFound:
        raise NotFound(
            f"{place.address} is not a backup: {manifest.NAME}, which is written last, is missing"
        ) from None


def check(place: ObjectStore, progress: Progress | None = None) -> BackupManifest:
    """Read every file of a backup and compare it with the manifest."""
    listed = read_manifest(place)
    reader = _Reader(place, listed, progress)
    for name in listed.files:
        for _ in reader.read(name):
            pass
    return listed


def restore(
    config: Config,
    place: ObjectStore,
    *,
    programs: Path | None = None,
    progress: Progress | None = None,
) -> BackupManifest:
    """Restore into the empty data directory and the empty database of this configuration."""
    listed = read_manifest(place)
    private = config.private_directory
    _check_empty(config)
    objects = [name for name in listed.files if name.startswith(f"{manifest.OBJECTS}/")]
    if objects and not config.topics.shared_tier:
        raise ConfigError(
            "the backup has objects of shared topics: name the object storage for them, "
            "topics.shared_tier"
        )
    staging = private / RESTORING
    staging.mkdir(parents=True)
    private.chmod(0o750)
    reader = _Reader(place, listed, progress)
    targets = {
        "topics": (staging / "topics", config.data_directory),
        "private": (staging / "private", private),
        "buffers": (staging / "buffers", config.buffers_directory),
        "routes": (staging / "routes", config.routes_directory),
    }
    for name in listed.files:
        top, _, rest = name.partition("/")
        if top in targets:
            path = targets[top][0] / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as out:
                for part in reader.read(name):
                    out.write(part)
                out.flush()
                os.fsync(out.fileno())
    for topic, next_offset in listed.topics.items():
        _check_topic(_staged(staging, topic), next_offset)
    if objects:
        store = ObjectStore(config.topics.shared_tier)
        for name in objects:
            store.write(name, reader.read(name))
        store.sync(objects)
    if listed.database_schema:
        _load(config, listed.database_schema, staging, reader.read("queues.dump"), programs)
    for staged, target in targets.values():
        if staged.exists():
            target.mkdir(parents=True, exist_ok=True)
            for entry in sorted(staged.iterdir()):
                entry.rename(target / entry.name)
            DISK.sync_dir(target)
    shutil.rmtree(staging)
    DISK.sync_dir(private)
    return listed


class _Reader:
    """Read the files of a backup and compare them with its manifest."""

    def __init__(
        self, place: ObjectStore, listed: BackupManifest, progress: Progress | None
    ) -> None:
        self._place = place
        self._files = listed.files
        self._meter = Meter(progress, sum(file.size for file in listed.files.values()))

    def read(self, name: str) -> Iterator[bytes]:
        yield from self._meter.measured(name, self._place.read(name))
        file, expected = self._meter.files[name], self._files[name]
        if file != expected:
            raise Damaged(
                f"{name} of the backup is damaged: {file.size} bytes with checksum "
                f"{file.crc32c:08x}, expected {expected.size} with {expected.crc32c:08x}"
            )


def _check_empty(config: Config) -> None:
    private = config.private_directory
    if (private / RESTORING).exists():
        raise Conflict(
            f"a restore into {config.data_directory} was interrupted: remove that directory, and "
            "drop the schema if the database is not the embedded one, then restore again"
        )
    for directory in (config.data_directory, config.buffers_directory, config.routes_directory):
        if directory.exists() and any(entry.name != LOST_FOUND for entry in directory.iterdir()):
            raise Conflict(f"{directory} is not empty: restore into an empty place")
    if url := url_of(config.database):
        asyncio.run(_check_database(url, config.database.db_schema))


async def _check_database(url: str, schema: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        if await connection.fetchval("SELECT to_regnamespace($1)", f'"{schema}"') is not None:
            raise Conflict(
                f"the database already has a schema {schema}: restore into another database, or "
                f"drop that schema first"
            )
    finally:
        await connection.close()


def _load(
    config: Config, schema: str, staging: Path, parts: Iterator[bytes], programs: Path | None
) -> None:
    if url := url_of(config.database):
        dump.load(url, schema, parts, programs)
        return
    private = config.private_directory
    server = EmbeddedPostgres(private / EMBEDDED, home=private)
    staging.chmod(0o755)
    server.start()
    try:
        dump.load(server.url, schema, parts, programs)
    finally:
        server.stop()


def _staged(staging: Path, label: str) -> Path:
    topic, partition = split_label(label)
    batches = staging / "private" / LOGS / topic / str(partition)
    return batches if batches.exists() else staging / "topics" / topic


def _check_topic(directory: Path, next_offset: int) -> None:
    report = verify(directory)
    if not report.sound:
        finding = report.findings[0]
        raise Damaged(
            f"topic {directory.name}: {finding.file} at {finding.position}: {finding.what} "
            f"(offsets up to {next_offset})"
        )
