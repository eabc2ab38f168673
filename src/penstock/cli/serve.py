"""`penstock serve`: parse the options, then replace this process with the broker.

The process executes its own command line again, with the options in an environment variable.
`penstock.__main__` sees the variable and runs `penstock.server.process`.
"""

import importlib.util
import json
import os
import sys
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.cli import ConfigFile, DataDir, Positive, Settings, app, usage
from penstock.config.load import parse_settings
from penstock.errors import ConfigError
from penstock.server import ORDER

Port = Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))]

for _library in ("asyncpg", "numpy", "picows", "uvloop"):  # of the extra `server`
    if importlib.util.find_spec(_library) is None:
        raise ModuleNotFoundError(_library, name=_library)


@app.command
def serve(
    *,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    tcp_port: Port = None,
    kafka_port: Port = None,
    http_port: Port = None,
    ws_port: Port = None,
    database_url: str | None = None,
    workers: Annotated[int | None, Parameter(validator=Positive)] = None,
    no_topics: bool = False,
    log_level: str | None = None,
    settings: Settings = None,
) -> None:
    """Start a broker.

    Without options, it runs an embedded PostgreSQL and keeps everything in ./penstock-data. With
    --database-url, it uses your own PostgreSQL. With --no-topics, it is a further broker on the
    same PostgreSQL, for queues only.

    The flags of metrics-governor set `exporter.queue`: `-queue-max-size 10000`.

    Examples:

    `penstock serve`

    `penstock serve --database-url postgresql://me@db/app --set topics.segment_bytes=4Gi`

    `penstock serve --database-url postgresql://me@db/app --no-topics`

    :param tcp_port: Serve TCP on this port.
    :param kafka_port: Serve Kafka clients on this port.
    :param http_port: Serve HTTP on this port.
    :param ws_port: Serve WebSocket on this port.
    :param database_url: URL of PostgreSQL 14 or later; default: an embedded one in the data
        directory.
    :param workers: Number of processes that share the HTTP port.
    :param no_topics: Serve queues only, as one of several brokers on the same PostgreSQL.
    :param log_level: Lowest level to log: debug, info, warning or error.
    """
    flags: dict[str, Any] = {
        "data_directory": data_dir,
        "database.url": database_url,
        "topics.enabled": False if no_topics else None,
        "workers": workers,
        "log_level": log_level,
    }
    for name, port in (
        ("tcp_server", tcp_port),
        ("kafka_server", kafka_port),
        ("http_server", http_port),
        ("websocket_server", ws_port),
    ):
        if port is not None:
            flags |= {f"{name}.port": port, f"{name}.enabled": True}
    try:
        flags |= parse_settings(settings or [])
    except ConfigError as error:
        raise usage(f"the configuration is wrong:\n{error}") from None
    os.environ[ORDER] = json.dumps([config, flags], default=str)
    os.execv(sys.executable, sys.orig_argv)
