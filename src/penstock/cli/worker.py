"""`penstock worker`: the command around `penstock.worker`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli import NotNegative, Positive, app
from penstock.worker import DRAIN_SECONDS, Settings, run


@app.command
def worker(
    target: str,
    /,
    *,
    processes: Annotated[int, Parameter(alias="-p", validator=Positive)] = 1,
    reload: bool = False,
    directory: Path = Path(),
    drain_seconds: Annotated[float, Parameter(validator=NotNegative)] = DRAIN_SECONDS,
    log_level: str = "info",
) -> None:
    """Run the consumers of a Python module.

    The module creates a `penstock.Client` (or `SyncClient`) and decorates functions with
    `@client.consumer(...)`.

    Example: `penstock worker shop.consumers:client --processes 4`

    :param target: MODULE:CLIENT, such as shop.consumers:client.
    :param processes: Number of processes that run the consumers.
    :param reload: Restart when a Python file changes.
    :param directory: Directory of the module.
    :param drain_seconds: On shutdown, seconds for messages in progress to finish.
    :param log_level: Lowest level to log: debug, info, warning or error.
    """
    raise SystemExit(run(Settings(target, processes, reload, directory, drain_seconds, log_level)))
