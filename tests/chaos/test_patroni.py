"""Queues on a cluster that Patroni looks after, with the ledger: nothing lost, doubled, reordered.

The long form of `test_postgres_failover.py`, where Patroni, etcd and PostgreSQL are installed.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.test_postgres_failover import health, loaded
from tests.support.form import SOAK
from tests.support.patroni import INSTALLED, NEEDED, TTL_SECONDS, Cluster
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.skipif(not SOAK, reason="needs minutes: make soak"),
    pytest.mark.skipif(not INSTALLED, reason=f"needs {NEEDED}"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="needs root, to run programs as the user postgres"
    ),
    pytest.mark.timeout(1500),
]
# Patroni waits for the leader's lease to end, and notices within a few seconds.
POPS_WITHIN = 3.0 * TTL_SECONDS


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.create()
        yield made
    finally:
        made.remove()


async def test_the_ledger_adds_up_over_whatever_happens_to_the_leader_and_to_etcd(cluster, scratch):
    async with loaded(cluster.url, scratch, "patroni", POPS_WITHIN) as load:
        leader = await asyncio.to_thread(cluster.wait)

        async def moved() -> None:
            """The broker works on the other one."""
            nonlocal leader
            leader = cluster.other(leader)
            await eventually(
                lambda: health(load.broker).get("database_host") == leader.address, 120
            )
            await load.on(leader.address)

        await asyncio.to_thread(cluster.switch_over, leader)
        await load.more()
        await moved()
        assert await asyncio.to_thread(cluster.wait) is leader

        await asyncio.to_thread(leader.kill)
        await load.more()
        killed = leader
        await moved()
        killed.start()
        assert await asyncio.to_thread(cluster.wait) is leader

        leader.signal(signal.SIGSTOP)
        await load.more()
        frozen = leader
        await moved()
        frozen.signal(signal.SIGCONT)  # it believes that it leads, until Patroni has looked
        await load.more()
        assert await asyncio.to_thread(cluster.wait) is leader
        await load.on(leader.address)

        await asyncio.to_thread(cluster.etcd.kill)  # then nobody leads: Patroni demotes
        await eventually(lambda: health(load.broker)["status"] == "unhealthy", 120)
        await load.more()
        cluster.etcd.start()
        leader = await asyncio.to_thread(cluster.wait)
        await load.on(leader.address)
