"""`penstock token`: tokens for the key that a broker is configured with."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import Commands, ConfigFile, Settings, app, option, usage
from penstock.config import load
from penstock.config.load import default_file, parse_settings
from penstock.protocol.roles import Role

commands = Commands("Create access tokens for a broker.", app, name="token")
ROLES = {role.title: role for role in (Role.READ_ONLY, Role.READ_WRITE, Role.ADMIN)}
DAY_SECONDS = 86_400.0


@commands.command()
def create(
    role: Annotated[str, option(f"Role of the token: {', '.join(ROLES)}.")],
    subject: Annotated[
        str, option("Who uses the token; stored with the messages they push, and in the audit log.")
    ],
    days: Annotated[float, option("Days until the token expires.", min=0.0)] = 30.0,
    private_key: Annotated[
        Path | None,
        option(
            "Private key (PEM) that belongs to the broker's auth.public_key; default: sign "
            "with auth.secret."
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Create an access token and print it. The token is signed on this machine with the key in the
    broker's configuration (`auth.secret` or JWT_SECRET), and verified as the broker would. Nothing
    is sent or stored.

    Examples:

    `penstock token create --role read-write --subject svc-checkout --days 90 -c penstock.yaml`

    `export PENSTOCK_TOKEN=$(penstock token create --role admin --subject ana --days 1)`
    """
    from penstock.wire.auth.issue import issue

    if role not in ROLES:
        raise usage(f"there is no role {role!r}: {', '.join(ROLES)}")
    loaded = load(config or default_file(), flags=parse_settings(settings or []))
    pem = private_key.read_bytes() if private_key else None
    typer.echo(issue(loaded.config.auth, ROLES[role], subject, days * DAY_SECONDS, pem))
