"""The paths in an archive come from outside: no file outside of it is read, linked or deleted."""

import json
from pathlib import Path

import pytest

from penstock.errors import Damaged
from penstock.pipeline.lake.convert import convert
from penstock.pipeline.lake.data_files import DataFile
from penstock.pipeline.lake.table import LakeTable

PATHS = ["../date=2026-01-01/victim", "/date=2026-01-01/victim", "topic=t//date=2026-01-01/victim"]


@pytest.mark.parametrize("path", PATHS)
def test_an_old_archive_that_names_a_file_outside_of_it_is_not_converted(
    tmp_path: Path, path: str
) -> None:
    victim = tmp_path / "date=2026-01-01" / "victim"
    victim.parent.mkdir()
    victim.write_bytes(b"precious")
    root = tmp_path / "archive"
    (root / "_archive").mkdir(parents=True)
    entry = {"path": path, "rows": 1, "bytes": 8, "first": 0, "last": 0}
    manifest = {"position": {"incarnation": "x", "next": 1}, "files": [entry]}
    (root / "_archive" / "topic-t.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match="not below it"):
        convert(LakeTable(str(root), "topic", "t"))
    assert victim.read_bytes() == b"precious"
    assert [each.name for each in root.iterdir()] == ["_archive"]


@pytest.mark.parametrize("path", PATHS)
def test_a_table_that_names_a_file_outside_of_it_is_not_read(path: str) -> None:
    with pytest.raises(Damaged, match="not below its root"):
        DataFile(path, 0, 0, "2026-01-01", 0, 0)
