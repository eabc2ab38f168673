"""The link from a data directory to a database cluster outside of it.

The embedded PostgreSQL makes such a link when its user cannot reach the data directory. A copy of
the data directory contains a copy of the link, not of the cluster, so two data directories would
share one database. The cluster therefore names the one link that owns it:

    <cluster>/owner    text, one line: the inode number of the link, a space, the path of the link

A copied link has another inode number. A data directory that was moved keeps it, and its old path
is gone. Releases before 0.3 wrote no `owner`. They made the link before the cluster, so a link that
is younger than its cluster is a copy.
"""

import os
import shlex
from pathlib import Path

OUTSIDE = Path("/var/lib/penstock")  # where the embedded PostgreSQL makes clusters outside
OWNER = "owner"


def is_owner(link: Path) -> bool:
    """Return whether the cluster at `link` belongs to it. A directory belongs to itself."""
    if not link.is_symlink():
        return True
    try:
        inode, _, path = (link / OWNER).read_text().rstrip("\n").partition(" ")
    except FileNotFoundError:
        return not _is_younger_than_cluster(link)
    if inode != str(link.lstat().st_ino):
        return False
    return Path(path) == _location(link) or not os.path.lexists(path)


def owner_line(link: Path) -> str:
    """Return the content of `owner` that makes `link` the owner of its cluster."""
    return f"{link.lstat().st_ino} {_location(link)}\n"


def explain(link: Path) -> str:
    """Return why the cluster at `link` is not used, and what to do."""
    line = shlex.quote(owner_line(link).rstrip("\n"))
    owner = shlex.quote(str(link.resolve() / OWNER))
    return (
        f"the database at {link.resolve()} belongs to another data directory: {link} is a copy of "
        "the link to it, and a copy of a data directory does not contain a database that is "
        "outside of it. To copy the database too, use 'penstock backup' and 'penstock restore'. "
        f"To start with an empty database: rm {shlex.quote(str(link))}. If this data directory "
        f"replaces the other one, which no broker may use any more: echo {line} > {owner}"
    )


def _is_younger_than_cluster(link: Path) -> bool:
    if link.resolve().parent != OUTSIDE:
        return False  # an operator made it, perhaps after moving the cluster
    try:
        created = (link / "data" / "PG_VERSION").stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return link.lstat().st_ctime_ns > created


def _location(link: Path) -> Path:
    return link.parent.resolve() / link.name
