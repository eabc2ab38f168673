"""Groups on shared topics whose members lease ranges."""

import asyncio
from pathlib import Path

import pytest

from tests.support.wait import eventually
from tests.topics.shared.test_mover import execute, moving


@pytest.mark.parametrize("moved", [False, True])
async def test_a_lost_lease_over_offsets_without_records_is_handed_out_at_once(
    database_url: str, tmp_path: Path, moved: bool
) -> None:
    """A failover leaves a million offsets out. Members need not work through them."""
    async with moving(database_url, tmp_path, lease_time=0.2) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"before"])
        first = await topics.groups.lease("group", log, "lost", 10)
        assert first is not None
        await topics.groups.complete(first.lease_id)
        await execute(database_url, "UPDATE penstock.shared_logs SET timeline = 0")
        for _ in range(15):
            await log.append([b"after"])
        assert log.next_offset > 1 << 20
        if moved:  # one range of an object has the records on both sides
            await topics.mover.step()
        lost = await topics.groups.lease("group", log, "lost", 20)
        assert lost is not None
        assert (lost.start, lost.end) == (1, log.next_offset)
        async with asyncio.timeout(60):
            again = await eventually(lambda: topics.groups.lease("group", log, "other", 3))
            assert (again.start, again.end) == (1, log.next_offset - 12)
            assert await topics.groups.complete(again.lease_id) == again.end
            rest = await topics.groups.lease("group", log, "other", 20)
            assert rest is not None
            assert (rest.start, rest.end) == (again.end, lost.end)
