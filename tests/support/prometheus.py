"""A real Prometheus: started, stopped and started again on the same port and data."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.support import guard
from tests.support.ports import free_port
from tests.support.wait import until

PROGRAM = os.environ.get("PENSTOCK_TEST_PROMETHEUS") or shutil.which("prometheus")
START_SECONDS = 120


class PrometheusProcess:
    """Takes remote write, and does what `config` says."""

    def __init__(self, directory: Path, config: str = "") -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "prometheus.yml").write_text(config)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "PrometheusProcess":
        assert PROGRAM is not None
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    PROGRAM,
                    f"--config.file={self._directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--web.enable-remote-write-receiver",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guard.watch(self._process.pid)
        until(self._is_ready, START_SECONDS, "Prometheus is ready")
        return self

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        try:
            return httpx.get(f"{self.url}/-/ready").is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(START_SECONDS)
            self._process = None

    def __enter__(self) -> "PrometheusProcess":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def samples(self, selector: str, window: str = "1d") -> dict[str, list[float]]:
        """The values that are stored, by the label `series`."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": f"{selector}[{window}]"})
        result: list[Any] = answer.raise_for_status().json()["data"]["result"]
        return {
            one["metric"].get("series", ""): [float(value) for _, value in one["values"]]
            for one in result
        }
