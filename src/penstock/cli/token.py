"""`penstock token`: tokens for the key that a broker is configured with."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli import ConfigFile, NotNegative, Settings, app, usage
from penstock.config import load
from penstock.config.load import default_file, parse_settings
from penstock.protocol.roles import Role

ROLES = {role.title: role for role in (Role.READ_ONLY, Role.READ_WRITE, Role.ADMIN)}
DAY_SECONDS = 86_400.0


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
