"""Run the tests of this package with Django 6, which needs Python 3.12, and without the backport."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.tools import ROOT


@pytest.mark.timeout(1800)
def test_the_backend_works_with_django_6(soak: bool, scratch: Path) -> None:
    if not soak:
        pytest.skip("makes an environment of its own: make soak")
    uv = Path(sys.executable).with_name("uv")
    environment = scratch / "venv"
    # uv does not see the versions of pyenv that are not activated.
    installed = sorted(Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python3"))
    python = installed[0] if installed else ">=3.12"
    new = [uv, "venv", "--quiet", "--no-python-downloads", "--python", python, environment]
    if subprocess.run(new, check=False).returncode:
        pytest.skip("needs Python 3.12")
    variables = {**os.environ, "VIRTUAL_ENV": str(environment)}
    install = [uv, "pip", "install", "--quiet"]
    for packages in (["-r", "requirements/dev.txt"], ["django>=6"], ["--no-deps", "-e", "."]):
        subprocess.run([*install, *packages], cwd=ROOT, env=variables, check=True)
    remove = [uv, "pip", "uninstall", "--quiet", "django-tasks"]
    subprocess.run(remove, cwd=ROOT, env=variables, check=True)
    tests = [environment / "bin/python", "-m", "pytest", "-q", "tests/django/test_tasks.py"]
    done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
