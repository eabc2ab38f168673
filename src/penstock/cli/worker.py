"""`penstock worker`: the command around `penstock.worker`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import app
from penstock.worker import DRAIN_SECONDS, Settings, run


@app.command()
def worker(
    target: Annotated[str, typer.Argument(help="module:client, such as shop.consumers:client.")],
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, help="How many processes run them.")
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start again when a Python file changes.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Where the module is.")
    ] = Path(),
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long they may finish what they handle.")
    ] = DRAIN_SECONDS,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the consumers of a Python module.

    The module makes a `penstock.Client` (or `SyncClient`) and decorates functions with
    `@client.consumer(...)`.

    Example: `penstock worker shop.consumers:client --processes 4`
    """
    raise typer.Exit(run(Settings(target, processes, reload, directory, drain_seconds, log_level)))
