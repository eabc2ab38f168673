"""`penstock worker`: the command around `penstock.worker`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import app
from penstock.worker import DRAIN_SECONDS, Settings, run


@app.command()
def worker(
    target: Annotated[str, typer.Argument(help="MODULE:CLIENT, such as shop.consumers:client.")],
    processes: Annotated[
        int,
        typer.Option(
            "--processes", "-p", min=1, help="Number of processes that run the consumers."
        ),
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a Python file changes.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Directory of the module.")
    ] = Path(),
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="On shutdown, seconds for messages in progress to finish.")
    ] = DRAIN_SECONDS,
    log_level: Annotated[
        str, typer.Option(help="Lowest level to log: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run the consumers of a Python module.

    The module creates a `penstock.Client` (or `SyncClient`) and decorates functions with
    `@client.consumer(...)`.

    Example: `penstock worker shop.consumers:client --processes 4`
    """
    raise typer.Exit(run(Settings(target, processes, reload, directory, drain_seconds, log_level)))
