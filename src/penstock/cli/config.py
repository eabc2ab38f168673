"""`penstock config`: show the effective configuration, or check a file. `penstock token`: create
tokens with the key in that file.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli import USAGE, ConfigFile, JsonOutput, NotNegative, Settings, app, say, usage
from penstock.cli.tables import Column, TextLine, View, table
from penstock.config import load
from penstock.config import show as effective
from penstock.config.load import default_file, parse_settings
from penstock.errors import ConfigError
from penstock.protocol.roles import Role

ROLES = {role.title: role for role in (Role.READ_ONLY, Role.READ_WRITE, Role.ADMIN)}
DAY_SECONDS = 86_400.0


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


@app.command
def token(
    *,
    role: str,
    subject: str,
    days: Annotated[float, Parameter(validator=NotNegative)] = 30.0,
    private_key: Path | None = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Create an access token and print it.

    The token is signed on this machine with the key in the
    broker's configuration (`auth.secret` or JWT_SECRET), and verified as the broker would. Nothing
    is sent or stored.

    Examples:

    `penstock token --role read-write --subject svc-checkout --days 90 -c penstock.yaml`

    `export PENSTOCK_TOKEN=$(penstock token --role admin --subject ana --days 1)`

    :param role: Role of the token: read-only, read-write or admin.
    :param subject: Who uses the token; stored with the messages they push, and in the audit log.
    :param days: Days until the token expires.
    :param private_key: Private key (PEM) that belongs to the broker's auth.public_key; default:
        sign with auth.secret.
    """
    from penstock.wire.auth.issue import issue

    if role not in ROLES:
        raise usage(f"unknown role {role!r}: use one of {', '.join(ROLES)}")
    loaded = load(config or default_file(), flags=parse_settings(settings or []))
    pem = private_key.read_bytes() if private_key else None
    print(issue(loaded.config.auth, ROLES[role], subject, days * DAY_SECONDS, pem))
