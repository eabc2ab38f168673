"""Find the broker's database: the configured one, or the embedded one of a broker on this machine.

The broker, the command line and pipelines all need this, so it is beside the configuration. It is
never sent over the network: a user who may read the data directory can read it there.
"""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from penstock.config import cluster_link
from penstock.config.load import default_file, load
from penstock.config.schema import Config, DatabaseSettings
from penstock.errors import ConfigError, NotFound

EMBEDDED = "postgres"  # its directory in the private directory


def url_of(settings: DatabaseSettings) -> str:
    """Return the configured URL, or one made from host, port, name, user and password; empty if
    none is configured.
    """
    if settings.url or not settings.host:
        return settings.url
    account = quote(settings.user, safe="")
    if settings.password:
        account += ":" + quote(settings.password, safe="")
    hosts = ",".join(
        host if ":" in host else f"{host}:{settings.port}"
        for host in map(str.strip, settings.host.split(","))
    )
    return f"postgresql://{account}@{hosts}/{quote(settings.name, safe='')}"


def socket_url(directory: Path) -> str:
    """Return the URL of the embedded database, by the directory of its socket."""
    return f"postgresql://postgres@/postgres?host={quote(str(directory))}"


def listening_directory(cluster: Path) -> Path | None:
    """Return where the server of a cluster listens; None when it does not run.

    The lock file of a copied cluster names the server of the cluster that it was copied from.
    """
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(lines) <= 4 or not Path("/proc", lines[0]).exists():
        return None
    return Path(lines[4]) if Path(lines[1]) == cluster.resolve() else None


def url_here(config: Config) -> str:
    """Return the database URL of the broker with this configuration, for programs on its
    machine.
    """
    if url := url_of(config.database):
        return url
    directory = config.data_directory.absolute()
    link = config.private_directory / EMBEDDED
    try:
        if not cluster_link.is_owner(link):
            raise NotFound(cluster_link.explain(link))
        sockets = listening_directory(link / "data")
    except PermissionError:
        raise NotFound(
            f"the embedded database in {directory} is for the broker's user and root only: "
            "run this as one of them"
        ) from None
    if sockets is None:
        raise NotFound(
            f"no embedded database runs in {directory}: start its broker, "
            "or name another data directory "
            "(--data-dir or PENSTOCK_DATA_DIRECTORY) or configuration (-c or PENSTOCK_CONFIG)"
        )
    return socket_url(sockets)


class DatabaseHere(NamedTuple):
    """How the broker of this machine reaches its database."""

    url: str
    schema: str
    read_url: str  # a standby to read from; empty for none


def database_here() -> DatabaseHere:
    """Return the database URL of a broker that would start here, for a program without
    configuration.
    """
    try:
        config = load(default_file()).config
    except ConfigError as error:
        raise NotFound(f"the configuration here is wrong: {error}") from error
    database = config.database
    return DatabaseHere(url_here(config), database.db_schema, database.read_url)


def data_directory_here() -> Path | None:
    """Return the data directory of a broker that would start here; None if there is none."""
    try:
        directory = load(default_file()).config.data_directory.absolute()
    except ConfigError:
        return None
    return directory if directory.is_dir() else None
