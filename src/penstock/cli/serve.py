"""`penstock serve`: reads the options of a broker, and then becomes it.

The same command line is run once more in this process, with the options in an environment
variable: `penstock.__main__` sees it, and goes to `penstock.server.process`.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from penstock.cli import Command, ConfigFile, Settings, app, option, usage
from penstock.config.governor_flags import translate_flags
from penstock.config.load import parse_settings
from penstock.errors import ConfigError
from penstock.server import ORDER

for _library in ("asyncpg", "numpy", "picows", "uvloop"):  # of the extra `server`
    if importlib.util.find_spec(_library) is None:
        raise ModuleNotFoundError(_library, name=_library)


class ServeCommand(Command):
    """`serve` also takes the flags of metrics-governor."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, translate_flags(args))
        except ConfigError as error:
            raise usage(str(error)) from None


@app.command(cls=ServeCommand)
def serve(
    config: ConfigFile = None,
    data_dir: Annotated[Path | None, option("The broker's data directory.")] = None,
    tcp_port: Annotated[int | None, option("Serve TCP on this port.", min=0, max=65535)] = None,
    kafka_port: Annotated[
        int | None, option("Serve Kafka clients on this port.", min=0, max=65535)
    ] = None,
    http_port: Annotated[int | None, option("Serve HTTP on this port.", min=0, max=65535)] = None,
    ws_port: Annotated[
        int | None, option("Serve WebSocket on this port.", min=0, max=65535)
    ] = None,
    database_url: Annotated[
        str | None,
        option("URL of PostgreSQL 14 or later; default: an embedded one in the data directory."),
    ] = None,
    workers: Annotated[
        int | None, option("Number of processes that share the HTTP port.", min=1)
    ] = None,
    no_topics: Annotated[
        bool, option("Serve queues only, as one of several brokers on the same PostgreSQL.")
    ] = False,
    log_level: Annotated[
        str | None, option("Lowest level to log: debug, info, warning or error.")
    ] = None,
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
