"""`penstock worker`: the command around `penstock.worker`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import app, argument, option
from penstock.worker import DRAIN_SECONDS, Settings, run


@app.command()
def worker(
    target: Annotated[str, argument("MODULE:CLIENT, such as shop.consumers:client.")],
    processes: Annotated[
        int, option("Number of processes that run the consumers.", "-p", min=1)
    ] = 1,
    reload: Annotated[bool, option("Restart when a Python file changes.")] = False,
    directory: Annotated[Path, option("Directory of the module.", "-d")] = Path(),
    drain_seconds: Annotated[
        float, option("On shutdown, seconds for messages in progress to finish.", min=0)
    ] = DRAIN_SECONDS,
    log_level: Annotated[
        str, option("Lowest level to log: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run the consumers of a Python module.

    The module creates a `penstock.Client` (or `SyncClient`) and decorates functions with
    `@client.consumer(...)`.

    Example: `penstock worker shop.consumers:client --processes 4`
    """
    raise typer.Exit(run(Settings(target, processes, reload, directory, drain_seconds, log_level)))
