"""The key of a batch is the same at every attempt, before and after a restart."""

from pathlib import Path

import pytest

from tests.export.making import block, exports, http_route, number_of, opened
from tests.export.scripted import HANG, TAKE_AND_RESET, ScriptedDestination, record
from tests.support.wait import eventually


@pytest.mark.parametrize("action", [HANG, TAKE_AND_RESET])
async def test_a_batch_keeps_its_key_over_a_restart_with_fsync_never_and_compression(
    tmp_path: Path, action: str
):
    async with ScriptedDestination(lambda ids, number: action) as destination:
        spec = http_route(destination.url, workers=2, fsync="never", compression="zstd")
        async with exports(tmp_path, {"r": spec}, shutdown_timeout=0.1) as running:
            await running.get("r").push([record(number, pad=2000) for number in range(20)])
            await eventually(lambda: len(set(destination.keys)) == 2)
        before = set(destination.keys)
        destination.rule = lambda ids, number: 200
        async with exports(tmp_path, {"r": spec}) as running:
            route = running.get("r")
            await eventually(lambda: route.queue.count == 0)
        assert {each.key for each in destination.ledger if each.answered} == before


async def test_a_block_taken_while_a_spill_compresses_it_is_stored_as_it_was_taken(
    tmp_path: Path,
):
    options = {"fsync": "never", "write_through": False, "compression": 2, "inmemory_blocks": 100}
    queue = await opened(tmp_path, **options)
    await queue.put([block(number, size=50_000) for number in range(100)])
    queue.limit_memory(1)  # a spill begins
    bodies = {}
    while (leased := await queue.take()) is not None:
        bodies[number_of(leased)] = leased.body
    await queue.close()
    again = await opened(tmp_path, **options)
    assert len(bodies) == 100
    while (leased := await again.take()) is not None:
        assert bodies.pop(number_of(leased)) == leased.body
    assert not bodies
    await again.close()
