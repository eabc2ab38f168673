"""Pipelines that report to the broker."""

from typing import Literal

import msgspec


class PipelineNode(msgspec.Struct):
    """A source, a step or a sink of a pipeline, and the names of its inputs."""

    kind: Literal["source", "step", "sink"]
    name: str
    title: str = ""
    inputs: list[str] = []


class PipelineBatch(msgspec.Struct):
    batch: int
    at: str
    rows: int
    ms: int


class PipelineReport(msgspec.Struct):
    """The state that a pipeline reports."""

    state: str
    at: float = 0.0  # when it was reported, in seconds since 1970
    batch: int = -1
    rows: int = 0  # read since the start
    rows_per_second: float = 0.0
    batch_ms: int = 0
    lag: int | None = None  # records or messages; None: no source counts
    position: str = ""  # of each source, in words
    lag_seconds: float | None = None  # age of the oldest of them, where it is known
    target_seconds: float | None = None  # what the age should not exceed
    progress: float | None = None  # of a run that ends by itself: 0 to 1, as far as it is known
    state_rows: int = 0  # of the stream's state
    state_bytes: int = 0
    graph: list[PipelineNode] = []  # sources, steps and sinks
    batches: list[PipelineBatch] = []  # the last ones, the newest first
    error: str | None = None
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    master: str = ""


class PipelineRun(msgspec.Struct):
    state: str
    started_at: float | None
    rows: int | None
    batch: int | None
    error: str | None
    host: str | None
    reported_at: float


class PipelineMinute(msgspec.Struct):
    at: float
    rows: int
    lag: int | None


class PipelineStatus(PipelineReport, kw_only=True):
    """A pipeline's last report, its last runs (the newest first) and its last minutes."""

    name: str
    reported_at: float
    stopping: bool = False
    runs: list[PipelineRun] = []
    minutes: list[PipelineMinute] = []


class PipelineList(msgspec.Struct):
    pipelines: list[PipelineStatus]


class PipelineWish(msgspec.Struct):
    stop: bool
