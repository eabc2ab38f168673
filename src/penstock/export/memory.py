"""Read the memory limit of the process.

It is the smallest limit that applies: that of a cgroup (version 2 or 1, our own group or one above
it), or the machine's memory. A process in a container that used the host's memory as its limit
would be killed.
"""

from pathlib import Path

from penstock.metrics import resident_bytes


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes this process may use: the smallest limit of its cgroups or the machine."""
    return min([_machine_memory(root), *(limit for limit, _ in _cgroups(root))])


def memory_used(root: Path = Path("/")) -> int:
    """Return the bytes in use against that limit: the tightest cgroup's, else resident ones."""
    groups = sorted((limit, usage) for limit, usage in _cgroups(root))
    if groups and groups[0][0] < _machine_memory(root):
        return groups[0][1]
    return resident_bytes()


def _machine_memory(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemTotal in /proc/meminfo")


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, usage) of our memory cgroup and of every visible one above it."""
    groups = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            limit = _number(directory / names[0])
            if limit is not None:
                groups.append((limit, _number(directory / names[1]) or 0))
    return groups


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means unlimited
