"""What lies in a tier comes from outside: no name in it leads out of the data directory."""

import os
from pathlib import Path

import msgspec
import pytest

from penstock.errors import Damaged
from penstock.log.tier.manifest import StoredSegment, TierManifest, manifest_name
from penstock.object_store import ObjectStore
from penstock.topics.tier.owner import STATE, TierState, TopicEnd
from tests.topics.tier.support import fill, pass_through, tiered

INCARNATION = "0" * 31 + "1"


async def make_tier(directory: Path, address: str) -> ObjectStore:
    async with tiered(directory, address) as topics:
        topic = await topics.create("t")
        await fill(topic)
        await topic.seal()
        await pass_through(topics)
    return ObjectStore(address)


def store_manifest(store: ObjectStore, at: str, **fields: str) -> None:
    manifest = TierManifest(tier="x", name="t", incarnation=INCARNATION, policy="delete")
    store.write(at, [msgspec.structs.replace(manifest, **fields).pack()])


async def test_adopting_a_tier_leaves_out_topics_whose_names_are_paths(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_bytes(b"precious")
    store = await make_tier(tmp_path / "one", f"file://{tmp_path}/tier")
    place = manifest_name(INCARNATION)
    for number, fields in enumerate(
        (
            {"name": "../escaped"},
            {"name": f"{tmp_path}/escaped"},
            {"name": ".penstock"},
            {"incarnation": str(victim)},
            {"incarnation": "../../../../victim"},
            {"incarnation": "0" * 31 + "2"},
        )
    ):
        store_manifest(store, place.replace(INCARNATION, f"{number:032x}"), **fields)
    state = TierState.parse(store.get(STATE)[0])
    state.topics = {
        **state.topics,
        str(victim): TopicEnd("a", 5),
        "../../../../victim": TopicEnd("b", 5),
        INCARNATION: TopicEnd("../escaped", 5),
    }
    store.write(STATE, [state.pack()])
    async with tiered(tmp_path / "two", store.address, adopt=True) as topics:
        assert [topic.name for topic in topics] == ["t"]
        assert topics.tier is not None
        report = topics.tier.adopted
        assert report is not None
        assert sum("is left out" in text for text in report["problems"]) == 9
    assert (victim / "file").read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["one", "tier", "two", "victim"]


@pytest.mark.parametrize("stem", ["../../secret", "/etc/secret", "a/b", ""])
def test_a_segment_of_the_tier_is_not_read_from_elsewhere(stem: str) -> None:
    segment = StoredSegment(stem=stem, base=0, end=1, rows=1, newest=0, files={})
    manifest = TierManifest(
        tier="x", name="t", incarnation=INCARNATION, policy="delete", segments=[segment]
    )
    with pytest.raises(Damaged, match="invalid name of a segment"):
        TierManifest.parse(manifest.pack())


async def test_objects_of_others_in_the_tier_stay_and_do_not_hold_up_the_collection(
    tmp_path: Path,
) -> None:
    store = await make_tier(tmp_path / "one", f"file://{tmp_path}/tier")
    store.write("topics/notes.txt", [b"mine"])
    store.write(f"topics/{INCARNATION}/left", [b"over"])
    async with tiered(tmp_path / "one", store.address, tier_grace=0.0) as topics:
        await pass_through(topics)
        assert topics.tier is not None
        await topics.tier.collect()
        await topics.tier.collect()
    assert "topics/notes.txt" in store.names()
    assert f"topics/{INCARNATION}/left" not in store.names()


def test_a_list_from_a_name_on_is_in_order_and_within_its_prefix(address: str) -> None:
    """By which brokers find objects of shared topics while the database is down."""
    store = ObjectStore(address)
    names = [f"shared/a/0/{i:020}-{i - 1:020}-id" for i in range(1, 120)]
    for name in [*reversed(names), "shared/a/1/0-0-id", "shared/b/0/0-0-id"]:
        store.write(name, [b"x" * 7])
    found = store.list_first("shared/a/0/", f"shared/a/0/{30:020}", 60)
    assert [(one.name, one.size) for one in found] == [(name, 7) for name in names[29:89]]
    assert [one.name for one in store.list_first("shared/a/0/", names[-2], 60)] == names[-1:]
    assert store.list_first("shared/a/0/", names[-1], 60) == []
