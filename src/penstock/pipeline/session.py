"""The Spark session pipelines run in: quiet, bounded, and cut into the same tasks whenever a batch
is run again.

`spark.sql.adaptive.enabled` is off because it merges and splits tasks by what it measures, and an
exactly-once sink must meet the same rows in the same task when a batch is repeated. The rest keeps
a small machine usable: no web page, no progress bar over ours, few shuffle partitions, loopback
addresses for a local master, temporary files out of the way.

Spark says a lot when it starts, and logs as an error what it then raises. Both are left out; with
PENSTOCK_SPARK_LOG set to a level (warn, info, ...) all of it is shown from that level on.
"""

import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG4J = """\
rootLogger.level = %s
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %%d{HH:mm:ss} %%p %%c{1}: %%m%%n%%ex{short}
"""
LOGGER_LEVELS = {
    # else the main class "sets the default log level" and says so
    "api.python.PythonGatewayServer": "error",
    # these log the failure of a task that is then raised, and reported with its cause
    "executor.Executor": "off",
    "scheduler.TaskSetManager": "off",
    "util.Utils": "off",
    "sql.execution.datasources.FileFormatWriter": "off",
    "sql.execution.streaming.checkpointing.StreamMetadata": "off",
}
SILENCE = "".join(
    f"logger.{i}.name = org.apache.spark.{name}\nlogger.{i}.level = {level}\n"
    for i, (name, level) in enumerate(LOGGER_LEVELS.items())
)
QUIET = "error"
LEVELS = ("off", "error", "warn", "info", "debug", "trace", "all")
# What the JVM and its start script print, past any logger.
START_UP_NOISE = (
    b"WARNING: Using incubator modules",
    b"Using Spark's default log4j profile",
    b"Setting default log level to",
    b"To adjust logging level use",
)

COMMON = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.python.daemon.module": "penstock.pipeline.daemon",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.log.structuredLogging.enabled": "false",
}
# Of PySpark: they print the stack of every error that is raised too.
NOISY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
}


def build(
    name: str = "penstock", master: str = "local[*]", settings: Mapping[str, str] | None = None
) -> "SparkSession":
    """A session with our data source. `master`: Spark's, or a Spark Connect address (sc://...)."""
    try:
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        from penstock.pipeline.sources.data_source import register
    except ImportError:
        raise Unavailable("pipelines need PySpark: pip install 'penstock[pipeline]'") from None
    builder = SparkSession.builder.appName(name)
    if master.startswith("sc://"):
        spark = _connected(builder, master, dict(settings or {}))
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        _start_python_fast()
        level = log_level()
        own: dict[str, Any] = {
            **COMMON,
            **(LOCAL if master.startswith("local") else {}),
            **_files(level),
        }
        own |= settings or {}
        builder = builder.master(master).config(map=own)
        with _own_interrupts():
            if level == QUIET:
                _start_jvm_quietly({"spark.master": master, **own})
            spark = builder.getOrCreate()
    for name in NOISY_LOGGERS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    register(spark)
    return spark


def log_level() -> str:
    """From which level on Spark's own log is shown."""
    level = os.environ.get("PENSTOCK_SPARK_LOG", "").strip().lower() or QUIET
    if level not in LEVELS:
        raise ConfigError(f"PENSTOCK_SPARK_LOG is one of {', '.join(LEVELS)}, not {level!r}")
    return level


def _start_jvm_quietly(settings: Mapping[str, str]) -> None:
    """Start the JVM of a first session, with all it writes to standard error passed on but for the
    start-up noise. A JVM that runs already stays as it is."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    conf = SparkConf().setAll(list(settings.items()))
    reading, writing = os.pipe()
    threading.Thread(target=_pass_on, args=(reading,), name="spark-stderr", daemon=True).start()
    try:
        SparkContext._ensure_initialized(gateway=launch_gateway(conf, {"stderr": writing}))  # type: ignore[no-untyped-call]
    finally:
        os.close(writing)


def _pass_on(reading: int) -> None:
    with open(reading, "rb") as lines:
        for line in lines:
            if not line.startswith(START_UP_NOISE):
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()


def find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin") if home else None)


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """A handler of Ctrl-C stays: a new SparkContext takes it for itself, to cancel all jobs."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else signal.default_int_handler
    try:
        yield
    finally:
        if before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def activate(spark: Any) -> Any:
    """The session, made the calling thread's own: there Spark looks data sources up.

    Jobs take a session or a function that makes one: wrong arguments are then reported before a
    JVM starts."""
    spark = spark() if callable(spark) else spark
    session = getattr(spark, "_jsparkSession", None)
    if session is not None:  # else Spark Connect, which has no such thing
        spark._jvm.SparkSession.setActiveSession(session)
    return spark


def _connected(builder: Any, master: str, settings: dict[str, str]) -> "SparkSession":
    """On a Spark Connect server: what queries need is set, the server's own settings refused."""
    for key in settings:
        if not key.startswith("spark.sql."):
            raise ConfigError(
                f"{key} belongs to the Spark Connect server at {master}: set it where that is "
                "started"
            )
    missing = f"{master} needs a Spark Connect client: pip install 'penstock[connect]'"
    # PySpark itself would take us for a doctest and leave, in some places
    if importlib.util.find_spec("grpc") is None:
        raise Unavailable(missing)
    try:
        spark: SparkSession = builder.remote(master).getOrCreate()
        for key, value in {**COMMON, **settings}.items():
            if key.startswith("spark.sql."):
                spark.conf.set(key, value)
    except ImportError as error:
        raise Unavailable(f"{missing} ({error})") from None
    except Exception as error:
        from pyspark.errors import PySparkException

        if not isinstance(error, PySparkException):
            raise
        raise Unavailable(
            f"the Spark Connect server at {master} cannot be used: {str(error)[:500]}"
        ) from error
    return spark


def _start_python_fast() -> None:
    """See `penstock.pipeline.site.sitecustomize`."""
    site = str(Path(__file__).parent / "site")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if site not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *paths])


def _files(level: str) -> dict[str, str]:
    """Keeps Spark's logs, warehouse and metadata out of the working directory."""
    directory = Path(tempfile.gettempdir()) / f"penstock-spark-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    # made by somebody else, who could then choose our logging
    if directory.stat().st_uid != os.getuid():
        directory = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
    log4j = directory / f"log4j2-{level}.properties"
    text = LOG4J % level + (SILENCE if level == QUIET else "")
    if not log4j.exists() or log4j.read_text() != text:
        beside = directory / f"log4j2.{os.getpid()}"
        beside.write_text(text)
        beside.rename(log4j)
    return {
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={log4j} -Dderby.system.home={directory}"
        ),
    }
