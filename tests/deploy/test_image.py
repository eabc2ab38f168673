"""The image: what .dockerignore lets through, and its steps, all of them run (soak)."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.deploy.image import ROOT, Stage, allowed, build, instructions
from tests.support import guard
from tests.support.form import SOAK
from tests.support.ports import free_port
from tests.support.wait import until

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"


def test_the_build_sees_what_it_copies_and_nothing_else():
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    copied = [
        rest.split()[:-1] for word, rest in instructions(DOCKERFILE.read_text()) if word == "COPY"
    ]
    sources = [source for words in copied if not words[0].startswith("--from") for source in words]
    assert {"requirements/run.txt", "src", "pyproject.toml", "README.md", "LICENSE"} <= set(sources)
    assert all((ROOT / source).exists() and allowed(source, rules) for source in sources)
    for name in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "src/penstock/__pycache__/x.pyc",
        ".env",
    ):
        assert not allowed(name, rules), name


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("unshare") is not None


@pytest.mark.skipif(not SOAK, reason="needs minutes, to install a whole environment: make soak")
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_the_image_runs_as_a_user_of_its_own_with_its_embedded_database_as_process_1():
    directory = Path(tempfile.mkdtemp(prefix="penstock-image-", dir="/var/tmp"))
    try:
        stage = build(directory)
        assert json.loads(stage.settings["ENTRYPOINT"]) == ["penstock"]
        assert stage.user == 10001
        assert stage.settings["VOLUME"] == stage.env["PENSTOCK_DATA_DIRECTORY"]
        run_broker(stage)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_broker(stage: Stage) -> None:
    port = free_port()
    stage.env |= {
        "PENSTOCK_HTTP_SERVER_PORT": str(port),
        "PENSTOCK_TCP_SERVER_PORT": "0",
        "PENSTOCK_WEBSOCKET_SERVER_PORT": "0",
    }
    command = [*json.loads(stage.settings["ENTRYPOINT"]), *json.loads(stage.settings["CMD"])]
    health = stage.settings["HEALTHCHECK"].partition("CMD ")[2]
    output = stage.directory / "output"
    for _ in range(2):  # the second start finds the first one's data
        with output.open("w") as log:
            process = subprocess.Popen(
                stage.command(*command, isolate=True), stdout=log, stderr=log
            )
            guard.watch(process.pid)
        try:
            until(
                lambda process=process: (
                    "is ready" in output.read_text() or process.poll() is not None
                ),
                120,
            )
            assert process.poll() is None, output.read_text()
            url = f"http://127.0.0.1:{port}"
            pushed = httpx.post(
                f"{url}/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]}
            )
            assert pushed.status_code == 201
            check = subprocess.run(
                stage.command(*json.loads(health)), capture_output=True, text=True, check=False
            )
            assert check.returncode == 0, check.stderr
            broker = int(subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True))
            owners = subprocess.check_output(
                ["ps", "-o", "uid=", "--ppid", str(broker), str(broker)], text=True
            )
            assert {int(uid) for uid in owners.split()} == {10001}
            os.kill(broker, signal.SIGTERM)
            assert process.wait(60) == 0, output.read_text()
        finally:
            process.kill()
            process.wait()
        assert "stopped in" in output.read_text()
        assert not list((stage.directory / "upper/var/lib/penstock").rglob("postmaster.pid"))
    failed = subprocess.run(
        stage.command(*json.loads(health)), capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert "refused" in failed.stderr
