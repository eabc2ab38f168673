"""Create the Spark session of a pipeline: quiet, small, and with tasks that are repeatable.

`spark.sql.adaptive.enabled` is off because it merges and splits tasks by measured sizes. An
exactly-once sink needs the same rows in the same task when a batch is repeated. The other settings
suit a small machine: no web page, no progress bar, few shuffle partitions, loopback addresses for
a local master, and temporary files outside of the working directory.

Start-up messages of Spark and log lines for errors that it also raises are not shown. Set
PENSTOCK_SPARK_LOG to a level (warn, info, ...) to show Spark's whole log from that level on.
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
    # otherwise, the main class logs that it sets the default log level
    "api.python.PythonGatewayServer": "error",
    # these log a task's failure, which is also raised and reported with its cause
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
# Lines that the JVM and its start script print without a logger.
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
# Loggers of PySpark that print the stack of every error, although it is also raised.
NOISY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
}
# Linux allows 107 bytes for the path of a socket; Spark adds a name such as "/.<UUID>.sock".
MAX_SOCKET_DIRECTORY = 107 - len("/..sock") - 36


def build(
    name: str = "penstock", master: str = "local[*]", settings: Mapping[str, str] | None = None
) -> "SparkSession":
    """Create a session with our data source. `master` may be a Spark Connect URL (sc://...)."""
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
        files = _directory()
        own: dict[str, Any] = {**COMMON, **_files(files, level)}
        if master.startswith("local"):
            own |= {**LOCAL, **socket_settings(files)}
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
    """Return the level from which Spark's own log is shown."""
    level = os.environ.get("PENSTOCK_SPARK_LOG", "").strip().lower() or QUIET
    if level not in LEVELS:
        raise ConfigError(f"PENSTOCK_SPARK_LOG must be one of {', '.join(LEVELS)}, not {level!r}")
    return level


def _start_jvm_quietly(settings: Mapping[str, str]) -> None:
    """Start the JVM and filter the start-up lines from its standard error. Does nothing if a JVM
    is already running."""
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
    """Keep the current SIGINT handler. A new SparkContext would replace it to cancel all jobs."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else signal.default_int_handler
    try:
        yield
    finally:
        if before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def activate(spark: Any) -> Any:
    """Make the session active in the calling thread, where Spark looks up data sources.

    `spark` may be a function that creates the session. A job can then report wrong arguments
    before a JVM starts."""
    spark = spark() if callable(spark) else spark
    session = getattr(spark, "_jsparkSession", None)
    if session is not None:  # Spark Connect has no active session
        spark._jvm.SparkSession.setActiveSession(session)
    return spark


def _connected(builder: Any, master: str, settings: dict[str, str]) -> "SparkSession":
    """Connect to a Spark Connect server and set the options of queries; refuse other settings."""
    for key in settings:
        if not key.startswith("spark.sql."):
            raise ConfigError(
                f"{key} belongs to the Spark Connect server at {master}: set it where the "
                "server is started"
            )
    missing = f"{master} needs a Spark Connect client: pip install 'penstock[connect]'"
    # without grpc, PySpark may assume that it runs in a doctest and exit the process
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
    """Put `penstock.pipeline.site.sitecustomize` on the path of Python workers."""
    site = str(Path(__file__).parent / "site")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if site not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *paths])


def _directory() -> Path:
    """Return a directory for Spark's files that only this user can change."""
    directory = Path(tempfile.gettempdir()) / f"penstock-spark-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        directory = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
    return directory


def socket_settings(directory: Path) -> dict[str, str]:
    """Return settings that connect Python workers over Unix sockets. Over TCP, Spark sends a task
    in two small packets, and the second often waits 40 ms for the acknowledgement of the first.
    """
    if len(os.fsencode(directory)) > MAX_SOCKET_DIRECTORY:
        return {}
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(directory),
    }


def _files(directory: Path, level: str) -> dict[str, str]:
    """Return settings that keep Spark's files out of the working directory."""
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
