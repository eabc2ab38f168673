"""Other releases, taken from the repository, to run beside this one on the libraries installed here."""

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def git(*arguments: str) -> str:
    return _git(*arguments).decode().strip()


def _git(*arguments: str) -> bytes:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git repository, to take the other release from")
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout


def chosen() -> str:
    """The commit that the environment names, if any."""
    return os.environ.get("PENSTOCK_PREVIOUS", "")


def unpack(reference: str, directory: Path) -> Path:
    """Extract a commit's package; return what to put on PYTHONPATH."""
    with tarfile.open(fileobj=BytesIO(_git("archive", reference, "src"))) as archive:
        archive.extractall(directory, filter="data")
    return directory / "src"
