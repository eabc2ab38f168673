"""How many workers there are, and how large a queue may be."""

from pathlib import Path

from penstock.config.schema import SendQueueSettings
from penstock.export.memory import memory_limit, memory_used
from penstock.export.sendqueue.queue import options_of
from penstock.export.workers import next_workers


def test_workers_follow_backlog_and_latency_and_give_way():
    steady = {"least": 1, "most": 16, "throttled": False}
    assert next_workers(4, backlog=1000, arrivals=0, latency=1.0, **steady) == 8  # at most twofold
    assert (
        next_workers(8, backlog=1000, arrivals=0, latency=0.05, **steady) == 7
    )  # five are enough: one at a time
    assert next_workers(8, backlog=0, arrivals=0, latency=0.05, **steady) == 7
    assert next_workers(1, backlog=0, arrivals=0, latency=0.05, **steady) == 1
    assert next_workers(2, backlog=0, arrivals=30, latency=0.1, **steady) == 3
    assert (
        next_workers(8, least=1, most=16, backlog=1000, arrivals=0, latency=1.0, throttled=True)
        == 4
    )
    assert next_workers(16, backlog=10_000, arrivals=0, latency=5.0, **steady) == 16


def test_the_memory_limit_is_the_tightest_cgroup(tmp_path: Path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal:       8388608 kB\n")
    write("proc/self/statm", "1000 500 0 0 0 0 0\n")
    assert memory_limit(tmp_path) == 8 << 30
    write("proc/self/cgroup", "0::/pod/app\n")
    write("sys/fs/cgroup/pod/app/memory.max", "max\n")
    write("sys/fs/cgroup/pod/memory.max", str(1 << 30))
    write("sys/fs/cgroup/pod/memory.current", str(123 << 20))
    assert memory_limit(tmp_path) == 1 << 30
    assert memory_used(tmp_path) == 123 << 20
    write("proc/self/cgroup", "4:memory:/docker/x\n1:cpu:/\n")
    write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", str(512 << 20))
    assert memory_limit(tmp_path) == 512 << 20
    result = options_of(SendQueueSettings(memory_percent=0.1, memory_limit_ratio=0.5), 1 << 30)
    assert result.max_bytes == int((1 << 30) * 0.05)
    assert result.chunk_size == result.max_bytes // 8
    assert options_of(SendQueueSettings(), 8 << 30).max_bytes == 1 << 30
