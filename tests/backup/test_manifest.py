"""A manifest comes from outside: no path in it leads out of where a restore writes."""

from pathlib import Path

import pytest

from penstock.backup.manifest import BackupFile, BackupManifest
from penstock.backup.restore import check, restore
from penstock.config import Config
from penstock.errors import Damaged
from penstock.object_store import ObjectStore


@pytest.mark.parametrize(
    "name",
    [
        "topics/{outside}/victim",
        "topics/../{outside}/victim",
        "topics/t/../../../../victim",
        "topics/t/./victim",
        "topics/.penstock/victim",
        "topics/victim",
        "topics",
        "private/{outside}/victim",
        "private/../../../../victim",
        "private/",
        "buffers//victim",
        "routes/r/\0victim",
        "../victim",
        "{outside}/victim",
        "",
    ],
)
def test_a_restore_refuses_a_path_that_leads_out_before_it_makes_anything(
    tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    name = name.format(outside=outside)
    store = ObjectStore(str(tmp_path / "backup"))
    manifest = BackupManifest(
        "0.2.0", "2026", files={"topics/t/data.log": BackupFile(0, 0), name: BackupFile(0, 0)}
    )
    store.write("manifest.json", [manifest.pack()])
    with pytest.raises(Damaged, match="not part of a backup"):
        check(store)
    with pytest.raises(Damaged, match="not part of a backup"):
        restore(Config(data_directory=tmp_path / "data"), store)
    assert [path.name for path in tmp_path.iterdir()] == ["backup"]


def test_a_restore_refuses_a_topic_whose_name_is_a_path(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "backup"))
    manifest = BackupManifest("0.2.0", "2026", topics={f"{tmp_path}/other": 7})
    store.write("manifest.json", [manifest.pack()])
    with pytest.raises(Damaged, match="invalid name of a topic"):
        restore(Config(data_directory=tmp_path / "data"), store)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["../victim", "/dev/null/victim", "a//b", "a/../../victim"])
def test_a_directory_of_objects_reads_and_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_bytes(b"secret")
    store = ObjectStore(str(tmp_path / "store"))
    with pytest.raises(Damaged, match="not the name of a file"):
        store.write(name, [b"x"])
    with pytest.raises(Damaged, match="not the name of a file"):
        store.read_range(name, 0, 6)
    with pytest.raises(Damaged, match="not the name of a file"):
        store.sync([name])
    assert (tmp_path / "victim").read_bytes() == b"secret"
    assert not list((tmp_path / "store").iterdir())
