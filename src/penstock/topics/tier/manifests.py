"""Write the manifests of this broker's topics: with a conditional write in the store, so that no
other broker's manifest is overwritten, then on disk as `tier.json`.
"""

from collections.abc import Mapping
from concurrent.futures import Executor

from penstock.errors import Conflict, Damaged, NotFound
from penstock.io.tasks import in_pool
from penstock.log.context import Context
from penstock.log.layout import TIER
from penstock.log.segment import Segment
from penstock.log.tier.cache import BlockCache
from penstock.log.tier.manifest import StoredSegment, TierManifest, manifest_name, object_name
from penstock.log.tier.segment import not_local, put_in_tier
from penstock.object_store import ObjectStore, Version
from penstock.protocol.names import is_incarnation
from penstock.topics.tier.owner import Ownership
from penstock.topics.topic import Topic


class Manifests:
    """Runs on the event loop. Requests to the store run in `pool`."""

    def __init__(
        self,
        context: Context,
        store: ObjectStore,
        ownership: Ownership,
        cache: BlockCache,
        pool: Executor,
    ) -> None:
        self._context = context
        self._store = store
        self._ownership = ownership
        self._cache = cache
        self._pool = pool
        # incarnation -> version of a manifest that is ours in this epoch; None: not written yet
        self.versions: dict[str, Version | None] = {}

    async def open(self, topic: Topic) -> None:
        """Check that the manifest in the store is ours, before the first write in an epoch. The
        caller holds `topic.maintenance`."""
        incarnation = topic.incarnation
        if incarnation in self.versions:
            return
        name = manifest_name(incarnation)
        try:
            data, version = await in_pool(self._pool, self._store.get, name)
        except NotFound:
            if topic.tier is not None and topic.tier.segments:
                raise Damaged(f"{self._store.address}/{name} is gone") from None
            self.versions[incarnation] = None
            return
        manifest = TierManifest.parse(data, name)
        local_version = topic.tier.version if topic.tier is not None else None
        if manifest.broker != self._ownership.broker or (
            local_version is not None and manifest.version not in (local_version, local_version + 1)
        ):
            raise Conflict(
                f"{self._store.address}/{name} was written by broker {manifest.broker}, and not by "
                "this one: start from the tier with an empty data directory and topics.adopt, or "
                "delete the topic here"
            )
        if local_version is None and manifest.segments:
            await self._write_local(topic, manifest)
            topic.attach([self.tiered(topic, one) for one in not_local(manifest, topic.segments)])
        self.versions[incarnation] = version

    def tiered(self, topic: Topic, stored: StoredSegment) -> Segment:
        """Return the topic's segment for one that is stored in the tier."""
        fs, holes = self._context.fs, topic.damage_report.holes_of(stored.base)
        blank = topic.format.new_segment(fs, topic.directory, stored.base, sealed=True)
        return put_in_tier(blank, topic.incarnation, stored, self._cache, holes)

    async def commit(
        self, topic: Topic, segments: list[StoredSegment], checkpoint: bytes | None = None
    ) -> None:
        """Write the manifest to the store, then to disk. The caller holds `topic.maintenance`."""
        before = topic.tier
        manifest = TierManifest(
            tier=self._ownership.tier,
            name=topic.name,
            incarnation=topic.incarnation,
            broker=self._ownership.broker,
            version=before.version + 1 if before is not None else 1,
            policy=topic.policy,
            layout=topic.format.name,
            archived=topic.archived_offset,
            limits=topic.limits,
            segments=segments,
            checkpoint=checkpoint or (before.checkpoint if before is not None else b""),
            damage=[dict(place) for place in topic.damage],
        )
        await in_pool(self._pool, self._put, manifest)
        await self._write_local(topic, manifest)

    def _put(self, manifest: TierManifest) -> None:
        name = manifest_name(manifest.incarnation)
        data = manifest.pack()
        try:
            version = self._store.put_if(name, data, self.versions.get(manifest.incarnation))
        except Conflict:
            # Perhaps an earlier attempt succeeded and its answer was lost.
            self._ownership.check()
            there, version = self._store.get(name)
            present = TierManifest.parse(there, name)
            if (present.broker, present.version) != (manifest.broker, manifest.version):
                self.versions.pop(manifest.incarnation, None)
                raise
            version = self._store.put_if(name, data, version)
        self.versions[manifest.incarnation] = version

    async def _write_local(self, topic: Topic, manifest: TierManifest) -> None:
        context = self._context
        await context.run(context.fs.replace, topic.directory / TIER, manifest.pack())
        topic.tier = manifest

    def unnamed_objects(self, topics: Mapping[str, Topic]) -> list[str]:
        """Return the objects that no manifest names. Blocks. `topics`: all, by incarnation."""
        objects: dict[str, list[str]] = {}  # by incarnation
        for item in self._store.list("topics/"):
            incarnation = item.name.split("/")[1]
            if is_incarnation(incarnation):  # other objects are not ours to delete
                objects.setdefault(incarnation, []).append(item.name)
        unnamed = []
        for incarnation, names in objects.items():
            manifest = manifest_name(incarnation)
            topic = topics.get(incarnation)
            if topic is not None and topic.tier is not None and incarnation in self.versions:
                named = {
                    object_name(incarnation, one.stem, kind)
                    for one in topic.tier.segments
                    for kind in one.files
                }
                unnamed += [name for name in names if name != manifest and name not in named]
            elif topic is None and manifest not in names:
                unnamed += names
        return unnamed
