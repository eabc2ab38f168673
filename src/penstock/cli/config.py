"""`penstock config`: show the effective configuration, or check a file."""

from pathlib import Path

from penstock.cli import USAGE, ConfigFile, JsonOutput, app, say
from penstock.cli.tables import Column, TextLine, View, table
from penstock.config import load
from penstock.config import show as effective
from penstock.config.load import default_file
from penstock.errors import ConfigError


@app.command
def config(
    file: Path | None = None,
    /,
    *,
    check: bool = False,
    changed: bool = False,
    config: ConfigFile = None,
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Show the effective configuration, or check a file.

    It prints where each value came from, and masks secrets.

    Examples:

    `penstock config -c penstock.yaml --changed`

    `penstock config --check penstock.yaml`

    :param file: YAML file, as --config.
    :param check: Only check the file, without the environment, and start nothing.
    :param changed: Show only values that differ from the defaults.
    """
    given = file or config or default_file()
    try:
        if check:
            return _checked(given)
        loaded = load(given)
    except ConfigError as error:
        say(str(error))
        raise SystemExit(USAGE) from None
    rows = [
        {"key": key, "value": value, "from": origin}
        for key, value, origin in effective(loaded)
        if not changed or origin != "default"
    ]
    for warning in loaded.warnings:
        say(f"warning: {warning}")
    columns = (Column("key"), Column("value", prose=True), Column("from"))
    return table(rows, *columns, empty="every value is the default")


def _checked(file: Path | None) -> View:
    from penstock.export.spec import parse_routes

    parse_routes(load(file, environ={}).config)
    return View({"file": str(file), "valid": True}, [TextLine(f"{file or 'the default'} is fine")])
