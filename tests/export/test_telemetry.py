"""The metrics of routes: their names, and what they count."""

import re
from pathlib import Path

from penstock.metrics import Metrics
from tests.export.making import FakeClock, exports, http_route, status_of
from tests.export.scripted import ScriptedDestination, record
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
SEED = """
queue_size queue_bytes queue_max_size queue_max_bytes queue_utilization_ratio
queue_disk_available_bytes queue_push_total queue_dropped_total queue_retry_total
queue_retry_success_total queue_retry_failure_total queue_disk_full_total
fastqueue_inmemory_blocks fastqueue_disk_bytes fastqueue_meta_sync_total fastqueue_chunk_rotations
fastqueue_inmemory_flushes queue_workers_active queue_workers_total queue_preparers_active
queue_senders_active queue_sends_inflight queue_export_latency_ewma_seconds circuit_breaker_state
circuit_breaker_open_total circuit_breaker_rejected_total queue_backoff_seconds data_loss_total
"""


async def exposed(directory: Path) -> dict[str, float]:
    """Return every sample of a route that delivered, failed and dropped something."""
    metrics = Metrics()
    async with ScriptedDestination(lambda ids, number: 500 if number == 1 else 200) as destination:
        spec = http_route(destination.url, max_size=3, full_behavior="drop_newest")
        async with exports(directory, {"r": spec}, metrics=metrics) as running:
            route = running.get("r")
            await route.pause()
            for number in range(5):
                await route.push([record(number), record(number + 100)])
            await route.resume()
            await eventually(lambda: route.queue.count == 0)
            collected = {}
            for line in metrics.text().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    collected[name] = float(value)
            return collected


async def test_every_metric_of_routes_is_documented_and_has_the_name_of_the_seed(tmp_path: Path):
    samples = await exposed(tmp_path)
    names = {name.partition("{")[0] for name in samples}
    dropped = 'penstock_export_queue_dropped_total{reason="damaged",route="r"}'
    assert samples[dropped] == 0, "an increase shows only from a value that was there before"
    assert {f"penstock_export_{name}" for name in SEED.split()} <= names
    documents = (ROOT / "docs/reference/metrics.md").read_text()
    documented = set(re.findall(r"\bpenstock_export_[a-z_]+", documents))
    assert documented == {name for name in names if name.startswith("penstock_export_")}


async def test_the_counters_tell_what_happened(tmp_path: Path):
    samples = await exposed(tmp_path)
    assert samples['penstock_export_queue_dropped_total{reason="newest",route="r"}'] == 2
    assert samples['penstock_export_queue_dropped_records_total{reason="newest",route="r"}'] == 4
    assert samples['penstock_export_data_loss_total{route="r"}'] == 0, "the policy dropped it"
    assert samples['penstock_export_queue_accepted_records_total{route="r"}'] == 10
    assert samples['penstock_export_queue_delivered_records_total{route="r"}'] == 6
    assert (
        samples['penstock_export_queue_retry_failure_total{error_type="server_error",route="r"}']
        == 1
    )
    assert samples['penstock_export_queue_retry_success_total{route="r"}'] == 1
    assert samples['penstock_export_circuit_breaker_state{route="r",state="closed"}'] == 1
    assert samples['penstock_export_queue_max_size{route="r"}'] == 3


async def test_the_backoff_is_the_time_to_the_next_probe_while_the_breaker_is_open(tmp_path: Path):
    metrics, clock = Metrics(), FakeClock()
    breaker = {"threshold": 1, "reset_timeout": "30s"}
    async with ScriptedDestination(lambda ids, number: 500) as destination:
        spec = http_route(destination.url, circuit_breaker=breaker)
        async with exports(tmp_path, {"r": spec}, metrics=metrics, clock=clock) as running:
            route = running.get("r")
            await route.push([record(1)])
            await eventually(lambda: route.breaker.state == "open")
            await eventually(lambda: _sample(metrics, "queue_backoff_seconds") == 30.0)
            await clock.advance(12)
            await eventually(lambda: _sample(metrics, "queue_backoff_seconds") == 18.0)
            assert status_of(route)["backoffSeconds"] == 18.0
            destination.rule = lambda ids, number: 200
            await clock.advance(18)
            await eventually(lambda: route.queue.count == 0)
            await eventually(lambda: _sample(metrics, "queue_backoff_seconds") == 0.0)


async def test_records_lost_to_damage_are_data_loss_and_those_purged_are_not(tmp_path: Path):
    spec = http_route("http://127.0.0.1:1/", compression="none", inmemory_blocks=1)
    spec["queue"]["max_bytes"] = "80Ki"  # chunks of 10 KiB
    async with exports(tmp_path, {"r": spec}) as running:
        await running.get("r").pause()
        for number in range(10):
            await running.get("r").push([record(number, pad=1000)] * 3)
    overwrite_first_chunk(tmp_path)
    metrics = Metrics()
    async with ScriptedDestination() as destination:
        spec["destination"]["url"] = destination.url
        async with exports(tmp_path, {"r": spec}, metrics=metrics) as running:
            route = running.get("r")
            await route.resume()
            await eventually(lambda: route.queue.count == 0)
            await route.pause()
            await route.push([record(10), record(11)])
            assert await route.purge() == 2
    lost = _sample(metrics, "data_loss_total")
    assert lost == 30 - len(destination.ids) > 0
    label = ',reason="damaged"'
    assert _sample(metrics, "queue_dropped_records_total", label) == lost
    assert _sample(metrics, "queue_dropped_total", label) == lost / 3
    assert _sample(metrics, "queue_dropped_records_total", ',reason="purged"') == 2
    assert _sample(metrics, "queue_dropped_total", ',reason="purged"') == 1


def overwrite_first_chunk(directory: Path) -> None:
    first = min(directory.glob("**/0000*"))
    first.write_bytes(b"\0" * first.stat().st_size)


def _sample(metrics: Metrics, name: str, labels: str = "") -> float:
    return float(metrics.samples()[f'penstock_export_{name}{{route="r"{labels}}}'])
