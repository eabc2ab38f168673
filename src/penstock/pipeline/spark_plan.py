"""Inspect the plan that Spark's analyzer makes of a frame, before anything runs.

Validation and runs check the same plan here: what Spark does not support in streams, what would
differ when a batch runs again, and which steps keep state. Spark Connect shows its clients no plan;
its server rejects unsupported plans when the query starts.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import AnalysisException

from penstock.errors import ConfigError
from penstock.pipeline.pipeline_file import PipelineFile

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


# A node of a plan as Spark prints it.
NODE = re.compile(r"^[\s:+-]*(?:\*\(\d+\) )?'?(\w+)(.*)", re.MULTILINE)
# Logical nodes that bring rows together, for Spark Connect, which shows a stream no physical plan.
GATHERS = re.compile(
    "Aggregate|Distinct|Deduplicate|Join|Repartition|Rebalance|GlobalLimit|Window$|Sort$|Intersect|Except"
    "|FlatMapGroups|MapGroups|TransformWithState"
)


def inputs_of(spark: Any, pipeline: PipelineFile) -> dict[str, list[str]]:
    """Return the views that each step reads, once for each place where it does."""
    inputs: dict[str, list[str]] = {}
    names = {name.lower(): name for name in pipeline.views}
    for step in pipeline.steps:
        if step.sql and hasattr(spark, "_jvm"):
            parser = spark._jsparkSession.sessionState().sqlParser()
            tables = (name.lower() for name in _relations(parser.parsePlan(step.sql)))
            inputs[step.name] = [names[name] for name in tables if name in names]
        elif step.sql:  # Spark Connect has no parser to ask
            inputs[step.name] = list(names.values())
        else:
            inputs[step.name] = [pipeline.view_before(step)]
        names[step.name.lower()] = step.name
    return inputs


def _relations(plan: Any) -> Iterator[str]:
    """Yield the names of tables in a plan that is only parsed."""
    if plan.nodeName() == "UnresolvedRelation":
        yield str(plan.tableName())
    inner = _each(plan.innerChildren())  # subqueries, and what WITH defines
    for child in [*_each(plan.children()), *inner]:
        yield from _relations(child)


def is_unordered(frame: Any) -> bool:
    """Return whether a repeated run could number the rows differently."""
    if not hasattr(frame, "_jdf"):
        return gathers(frame._explain_string(extended=True))
    # A frame made by spark.sql() does not say that it is a stream until something is made of it
    execution = frame.select("*")._jdf.queryExecution()
    modes = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode
    return shuffles(execution.explainString(modes.fromString("simple")))


def shuffles(plan: str) -> bool:
    """Return whether a physical plan moves rows between tasks, or reads them in the order of a hash
    table. A broadcast join leaves the rows of the other side where they are.
    """
    return any(
        (name.endswith("Exchange") and "BroadcastExchange" not in name + rest)
        or name.endswith("Aggregate")
        for name, rest in NODE.findall(plan)
    )


def gathers(plan: str) -> bool:
    """Return the same for a logical plan, in which a join may be one that will not shuffle."""
    return any(GATHERS.search(name) for name, _ in NODE.findall(plan))


def warn_of_float_sums(frame: Any) -> None:
    """Warn about values that may differ when a batch is run again: those written first stay."""
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
    """Reject rows that could differ when their batch runs again, if they are written once."""
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
    """Reject what Spark would reject when the stream starts."""
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
        reason = str(error).partition(";")[0]
        hint = ""
        if "watermark" in reason:
            hint = (
                ". Give the source a watermark, such as {at: 10 minutes}, and group by "
                "window(at, '1 minute'), or give the sink `mode: update`"
            )
        raise ConfigError(f"Spark does not run this as a stream: {reason}{hint}") from None


def stateful_nodes(frame: Any) -> int:
    """Return how many of the plan's operators keep state between batches."""
    return sum(
        STATEFUL.fullmatch(node.nodeName()) is not None and _gathers(node)
        for node in _nodes(analyzed(frame))
    )


def analyzed(frame: Any) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _gathers(node: Any) -> bool:
    """Return whether an operator keeps state: all of its inputs are streams."""
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
    """Yield the functions in the expression whose result differs from run to run."""
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
    """Return the elements of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]
