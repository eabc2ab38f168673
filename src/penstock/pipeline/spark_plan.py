"""What Spark's analyzer makes of a frame, looked at before anything runs.

Validation and a run ask the same questions here, of the same plan: what Spark does not do with
streams, what would come out differently when a batch is run again, and which steps keep state.
Spark Connect shows its clients no plan; there the server refuses what it does not do when the query
starts.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import AnalysisException

from penstock.errors import ConfigError

log = logging.getLogger("penstock.pipeline")

# These depend on the task and its rows alone, or on nothing that changes between two attempts.
REPEATABLE = {"monotonically_increasing_id", "spark_partition_id", "input_file_name"}
REPEATABLE |= {"current_user", "user", "session_user", "current_catalog", "current_database"}
REPEATABLE |= {"current_schema", "current_timezone", "current_path"}
STATEFUL = re.compile(
    "Aggregate|Distinct|Deduplicate(WithinWatermark)?|(Lateral|AsOf)?Join|(Global|Local)Limit"
    "|FlatMapGroups(InPandas)?WithState|TransformWithState(In(PySpark|Pandas))?"
)
# Aggregates whose result over floats depends on the order in which partial results are merged, and
# what hides the difference.
MERGED = re.compile("(try_)?(sum|avg)|mean|std.*|var.*|covar.*|corr|skewness|kurtosis|regr_.*")
ROUNDED = {"round", "bround", "floor", "ceil"}


def warn_of_float_sums(frame: Any) -> None:
    """Say which values may differ when a batch is run again: those written first stay."""
    if not hasattr(frame, "_jdf"):
        return
    expressions = (one for node in _nodes(analyzed(frame)) for one in _each(node.expressions()))
    names = sorted({name for one in expressions for name in _float_sums(one)})
    if names:
        log.warning(
            "%s over FLOAT or DOUBLE may differ in its last digits when a batch is run again, "
            "since partial results are merged in any order. The value that is written first stays. "
            "If runs must agree, aggregate DECIMAL (CAST(x AS DECIMAL(18, 2))), or round() in the "
            "step",
            ", ".join(names),
        )


def _float_sums(expression: Any) -> Iterator[str]:
    name = str(expression.prettyName())
    if name in ROUNDED:
        return
    children = _each(expression.children())
    if MERGED.fullmatch(name) and any(
        child.dataType().simpleString() in ("double", "float") for child in children
    ):
        yield str(expression.sql())
        return
    for child in children:
        yield from _float_sums(child)


def refuse_unrepeatable(frame: Any) -> None:
    """Rows written exactly once must be the same rows when their batch is run again."""
    if not hasattr(frame, "_jdf"):
        return
    names = sorted(set(_unrepeatable(frame)))
    if names:
        raise ConfigError(
            "what is written must not differ when a batch is run again, and "
            f"{', '.join(f'{one}()' for one in names)} would: use columns of the records instead, "
            "such as timestamp or createdAt for the time"
        )


def refuse_unsupported(frame: Any, mode: str) -> None:
    """What Spark would refuse when the stream starts."""
    if not hasattr(frame, "_jdf"):
        return
    jvm = frame.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(
            analyzed(frame), modes.Update() if mode == "update" else modes.Append()
        )
    except AnalysisException as error:
        raise ConfigError(
            f"Spark does not run this as a stream: {str(error).partition(';')[0]}"
        ) from None


def stateful_nodes(frame: Any) -> int:
    """How many of the plan's operators keep state from batch to batch."""
    return sum(
        STATEFUL.fullmatch(node.nodeName()) is not None and _gathers(node)
        for node in _nodes(analyzed(frame))
    )


def analyzed(frame: Any) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _gathers(node: Any) -> bool:
    """A join keeps state when both its sides are streams, anything else when its input is one."""
    children = _each(node.children())
    return all(child.isStreaming() for child in children) and bool(children)


def _unrepeatable(frame: Any) -> Iterator[str]:
    pattern = frame.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.CURRENT_LIKE()
    for node in _nodes(analyzed(frame)):
        if node.nodeName() == "Sample":
            yield "sample"
        for expression in _each(node.expressions()):
            yield from _varying(expression, pattern)


def _varying(expression: Any, pattern: Any) -> Iterator[str]:
    """The functions within whose result is another one the next time."""
    if expression.deterministic() and not expression.containsPattern(pattern):
        return
    children = _each(expression.children())
    inner = [name for child in children for name in _varying(child, pattern)]
    yield from inner
    own = all(child.deterministic() and not child.containsPattern(pattern) for child in children)
    if own and expression.prettyName() not in REPEATABLE:
        yield str(expression.prettyName())


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in [*_each(plan.children()), *_each(plan.subqueries())]:
        yield from _nodes(child)


def _each(sequence: Any) -> list[Any]:
    """A Scala sequence's elements."""
    return [sequence.apply(i) for i in range(sequence.size())]
