"""Checks of a pipeline file that need no Spark: functions, files, topics, queues and routes.

What is wrong in the file itself, its options among it, is refused when it is decoded
(`penstock.pipeline.pipeline_file`). SQL, columns and types are for Spark's analyzer alone
(`penstock.pipeline.query_builder`): it says what a run would say.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, InvalidRequest, NotFound, PenstockError
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import ReachOptions, default_token, read_options
from penstock.pipeline.pipeline_file import PipelineFile, PipelineSink, sink_place, source_kind
from penstock.pipeline.sources.postgres import Postgres


def check(pipeline: PipelineFile, *, ask_broker: bool = True) -> PipelineFile:
    """Raise ConfigError for what is wrong; returns the pipeline with its routes resolved."""
    for step in pipeline.steps:
        if step.python:
            load_function(step.python, f"step {step.name}")
    for name, source in pipeline.views.items():
        files = source.parquet or source.table
        if files and "://" not in files and not Path(files).exists():
            raise ConfigError(f"source {name}: directory {files} does not exist")
    for name, sink in pipeline.outputs.items():
        if sink.foreachBatch:
            load_function(sink.foreachBatch, sink_place(name))
    if not ask_broker:
        return pipeline
    _check_topics(pipeline)
    _check_queues(pipeline)
    return resolve_routes(pipeline)


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Convert an error of a source or sink to an error of the pipeline file."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(f"{place}: {error}") from None


def load_function(named: str, where: str) -> Callable[..., Any]:
    """Return the function `module:name`, or raise ConfigError."""
    module, _, name = named.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from error
    if function is None or not callable(function):
        raise ConfigError(f"{where}: {module} has no function {name!r}")
    return function


def _check_queues(pipeline: PipelineFile) -> None:
    for name, source in pipeline.views.items():
        if source.queue:
            with naming(f"source {name}"):
                kind, given = source_kind(pipeline, source)
                postgres = Postgres(read_options(kind or ReachOptions, given))
            sql = "SELECT name FROM queues WHERE deleted_at IS NULL ORDER BY name"
            names = [queue for (queue,) in postgres.rows(sql)]
            if source.queue not in names:
                raise ConfigError(
                    f"source {name}: queue {source.queue!r} does not exist in the database; "
                    f"queues: {', '.join(names[:10]) or 'none yet'}"
                )


def resolve_routes(pipeline: PipelineFile) -> PipelineFile:
    """Return the pipeline with routes replaced by the topic or queue they read."""
    if not any(sink.route for sink in pipeline.outputs.values()):
        return pipeline
    sinks = {
        name: _resolve_route(pipeline, sink) if sink.route else sink
        for name, sink in pipeline.outputs.items()
    }
    return msgspec.structs.replace(pipeline, sink=None, sinks=sinks)


def _resolve_route(pipeline: PipelineFile, sink: PipelineSink) -> PipelineSink:
    """Return the topic or queue that a route reads. Spark writes there, and the route delivers with
    its own breaker, retries and dead letters.
    """
    assert sink.route is not None
    try:
        with BrokerCaller(pipeline.url, token=pipeline.token, timeout=5.0) as caller:
            route = caller.json("GET", resource("/api/v1/routes", sink.route))
    except NotFound:
        raise ConfigError(f"route {sink.route!r} does not exist on {pipeline.url}") from None
    except PenstockError as error:
        raise ConfigError(
            f"the broker cannot be asked for export route {sink.route!r}: {error}"
        ) from None
    source = route.get("source")  # the word "push" when there is none
    for kind in ("topic", "queue"):
        if isinstance(source, dict) and source.get(kind):
            return msgspec.structs.replace(sink, **{"route": None, kind: source[kind]})
    raise ConfigError(
        f"export route {sink.route!r} takes direct pushes only: give it a source topic, which "
        "keeps Spark's output until it is delivered"
    )


def _check_topics(pipeline: PipelineFile) -> None:
    """Check that the topics to read exist. A sink's topic is created by the first write."""
    topics = [
        part.strip() for s in pipeline.views.values() if s.topic for part in s.topic.split(",")
    ]
    if not topics or any("directory" in source.options for source in pipeline.views.values()):
        return
    with TopicLink(pipeline.broker, patience=3.0, token=default_token(pipeline.token)) as link:
        for topic in topics:
            try:
                link.info(topic)
            except NotFound:
                names = ", ".join(link.names()[:10]) or "none yet"
                raise ConfigError(
                    f"topic {topic!r} does not exist on {pipeline.broker}; topics: {names}"
                ) from None
            except PenstockError as error:
                raise ConfigError(
                    f"the broker cannot be asked for topic {topic!r}: {error}"
                ) from error
