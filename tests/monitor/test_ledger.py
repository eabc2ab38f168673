"""The books: what was accepted is somewhere, or it shows."""

from pathlib import Path

from penstock.monitor.figures import topic_books
from tests.support.topics import bits, running


async def test_the_books_of_topics_add_up_after_compaction_and_retention_and_show_a_loss(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, fsync="never") as store:
        assert topic_books(store) is None
        for name in ("t", "u"):
            topic = await store.create(name)
            for _ in range(3):
                await topic.append([b"a", b"b", b"c", b"d"])
                await topic.seal()
            await topic.append([b"e"])
        topic = store.require("t")
        await topic.set_policy("compact")
        await store.compact("t", [4, 8], bits([5, 11], 8, 4))
        await topic.drop(topic.segments[:1])
        books = topic_books(store)
        assert books == {
            "part": "topics",
            "accepted": 26,
            "kept": 3 + 13,
            "removed": 4,
            "compacted": 6,
            "agrees": True,
        }
        await topic.expect(20, "a group")  # records 13 to 19 are lost
        await topic.append([b"f"])
        lost = topic_books(store)
        assert lost is not None
        assert (lost["accepted"], lost["kept"], lost["agrees"]) == (34, 17, False)
