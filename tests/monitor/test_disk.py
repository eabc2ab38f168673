"""When the disk will be full, as far as its last hours say so."""

from pathlib import Path

from penstock.monitor.figures import DiskWatch

GIB = 1 << 30
HOUR = 3600.0


class Disk:
    """A disk of 100 GiB and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = 24 * GIB
        self.watch = DiskWatch(Path("/"), usage=self.usage, clock=lambda: self.now)

    def usage(self, _: Path) -> tuple[int, int, int]:
        return 100 * GIB, 100 * GIB - self.free, self.free

    def full_in(self) -> float | None:
        space = self.watch.sample()
        assert space is not None
        return space.full_in_seconds


def test_a_burst_of_some_minutes_is_not_the_end_of_the_disk():
    disk = Disk()
    assert disk.full_in() is None
    disk.now, disk.free = 600.0, 22 * GIB
    assert disk.full_in() is None, "ten minutes say nothing about the next hours"
    disk.now = 4 * HOUR
    seconds = disk.full_in()
    assert seconds == 22 * GIB / (2 * GIB / (4 * HOUR))


def test_a_disk_that_gains_room_is_never_full():
    disk = Disk()
    disk.full_in()
    disk.now, disk.free = 2 * HOUR, 30 * GIB
    assert disk.full_in() is None


def test_a_disk_that_cannot_be_asked_is_unknown():
    def gone(_: Path) -> tuple[int, int, int]:
        raise OSError("no such device")

    assert DiskWatch(Path("/"), usage=gone).sample() is None
