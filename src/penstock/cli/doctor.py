"""`penstock doctor`: list what can fail in production, each with the command that fixes it.

It asks the running broker for its effective configuration and figures. On the broker's machine it
also reads PostgreSQL's settings and the data directory, with the configuration that `penstock
backup` uses. It names the checks that it could not make; they are not findings.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock import __version__
from penstock.cli import BrokerApi, BrokerConfig, JsonOutput, app
from penstock.cli.live import figures_of
from penstock.cli.tables import Column, TableBlock, TextLine, View, duration, size
from penstock.config.values import parse_duration, parse_size
from penstock.errors import NotFound, PenstockError

BACKUP_RECORD = "last-backup"  # in the private directory: its time of change is that of a backup
BACKUP_DAYS = 7
BUFFER_SECONDS = 4 * 3600.0  # of an outage of PostgreSQL that the buffer should survive
LEAST_PUSH_RATE = 100 * 1024  # bytes per second that a broker without traffic is measured by
CLOCK_SECONDS = 2.0
LARGEST_QUEUES = 20  # whose retention is checked
ALTER = 'psql "$(penstock database url)" -c "ALTER SYSTEM SET {}" -c "SELECT pg_reload_conf()"'
DURABILITY = ("fsync", "synchronous_commit", "full_page_writes")  # that PostgreSQL must not skip
LISTENERS = ("http_server", "tcp_server", "kafka_server", "websocket_server")


class DoctorFinding(NamedTuple):
    level: Literal["error", "warning"]
    what: str
    fix: str  # a command, or a line of a configuration


@dataclass
class Examined:
    """The figures of a broker from its API, and on its machine from PostgreSQL and the disk."""

    api: BrokerApi
    config: dict[str, str]  # key -> value, as `penstock config` shows it
    live: dict[str, Any]
    asked_at: float  # the time here when `live` was current
    metrics: str
    private_directory: Path | None = None  # None: the broker is on another machine
    postgres: dict[str, Any] = field(default_factory=dict)  # settings; empty: not reachable
    skipped: list[str] = field(default_factory=list)


@app.command
def doctor(
    *,
    fail_on: Literal["warning", "error"] = "warning",
    given: BrokerConfig = BrokerConfig(),
    api: BrokerApi = BrokerApi(),
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Check a broker and its configuration for what will hurt in production.

    Each finding comes with the command that fixes it. The exit code is 1 if there are findings.
    Run it on the broker's machine, with the broker's configuration, to check PostgreSQL and backups
    too.

    Examples:

    `penstock doctor -c penstock.yaml`

    `penstock doctor --url https://broker.example:6632 --fail-on error --json`

    :param fail_on: Lowest level of a finding that makes the exit code 1.
    """
    broker = _examine(api, given)
    findings = [one for check in CHECKS for one in check(broker)]
    findings.sort(key=lambda one: one.level)
    failing = [one for one in findings if fail_on == "warning" or one.level == "error"]
    columns = (
        Column("level"),
        Column("what", prose=True, wrap=True),
        Column("fix", prose=True, wrap=True),
    )
    return View(
        {"findings": [one._asdict() for one in findings], "skipped": broker.skipped},
        [
            TableBlock(columns, findings, "no findings"),
            *(TextLine(f"not checked: {one}", "dim") for one in broker.skipped),
        ],
        failed=bool(failing),
    )


def _examine(api: BrokerApi, given: BrokerConfig) -> Examined:
    live = figures_of(api)
    asked_at = time.time()
    config = {row["key"]: row["value"] for row in api.get("/api/v1/config")["keys"]}
    with api.caller() as caller:
        metrics = caller.call("GET", "/metrics").decode()
    broker = Examined(api, config, live, asked_at, metrics)
    mine = next((one for one in live["brokers"] if one.get("self")), {"host": None})
    if mine["host"] != socket.gethostname():
        broker.skipped.append(f"PostgreSQL and backups: the broker is on {mine['host']}")
        return broker
    loaded = given.load().config
    if loaded.private_directory.is_dir():
        broker.private_directory = loaded.private_directory
    else:
        broker.skipped.append(f"backups: there is no {loaded.private_directory}")
    try:
        broker.postgres = asyncio.run(_ask_postgres(loaded))
    except (PenstockError, OSError) as error:
        broker.skipped.append(f"PostgreSQL: {error}")
    return broker


async def _ask_postgres(config: Any) -> dict[str, Any]:
    import asyncpg

    from penstock.config.database_url import url_here

    url = url_here(config)
    try:
        connection = await asyncpg.connect(url, timeout=10)
    except asyncpg.PostgresError as error:
        raise NotFound(f"it refuses the connection: {error}") from None
    try:
        rows = await connection.fetch("SELECT name, setting FROM pg_settings")
        clock = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    finally:
        await connection.close()
    return {row["name"]: row["setting"] for row in rows} | {"skew": clock - time.time()}


# Checks


def _check_retention(broker: Examined) -> Iterator[DoctorFinding]:
    largest = broker.api.get("/api/v1/queues", sort="-stored", limit=LARGEST_QUEUES)["queues"]
    for name in (row["name"] for row in largest):
        options = broker.api.get("/api/v1/queues", name)["options"]
        kept = options["retentionEnabled"] and (
            options["completedRetentionSeconds"] or options["retentionSeconds"]
        )
        if not kept and not options["ttl"]:
            yield DoctorFinding(
                "warning",
                f"queue {name} keeps completed messages forever",
                f"penstock queue configure {name} retentionEnabled=true "
                "completedRetentionSeconds=86400",
            )
    topics = broker.config
    limits = [parse_size(topics["topics.retention_bytes"])]
    limits.append(int(parse_duration(topics["topics.retention_age"])))
    if broker.live["counts"].get("topics") and not any(limits):
        yield DoctorFinding(
            "warning",
            "topics keep their records forever",
            "penstock serve --set topics.retention_age=7d",
        )


def _check_durability(broker: Examined) -> Iterator[DoctorFinding]:
    for name in DURABILITY:
        if broker.postgres.get(name) == "off":
            yield DoctorFinding(
                "error",
                f"PostgreSQL has {name} off: a power failure loses acknowledged messages",
                ALTER.format(f"{name} = on"),
            )
    for key, wanted in (("topics.fsync", "group"), ("exporter.queue.fsync", "always")):
        if (mode := broker.config[key]) in ("interval", "never"):
            yield DoctorFinding(
                "warning",
                f"{key} is {mode}: a power failure loses acknowledged records",
                f"penstock serve --set {key}={wanted}",
            )


def _check_access(broker: Examined) -> Iterator[DoctorFinding]:
    public = [
        f"{name} ({host})"
        for name in LISTENERS
        if broker.config[f"{name}.enabled"] == "true"
        and not re.fullmatch(r"localhost|127\..*|::1", host := broker.config[f"{name}.host"])
    ]
    if public and broker.config["auth.enabled"] != "true":
        yield DoctorFinding(
            "error",
            f"everyone who reaches {', '.join(public)} is admin: no tokens are required",
            "penstock serve --set auth.enabled=true --set auth.secret=$(openssl rand -hex 32)",
        )


def _check_postgres(broker: Examined) -> Iterator[DoctorFinding]:
    if broker.postgres.get("autovacuum") == "off":
        yield DoctorFinding(
            "error",
            "PostgreSQL has autovacuum off: tables grow without limit",
            ALTER.format("autovacuum = on"),
        )
    database = broker.live["database"] or {}
    if (allowed := database.get("maxConnections")) is None:
        return
    pool = int(broker.config["database.pool_size"]) + int(
        broker.config["database.browse_pool_size"]
    )
    processes = max(int(broker.config["workers"]), len(broker.live["brokers"]))
    if processes * pool > 0.8 * allowed:
        yield DoctorFinding(
            "warning",
            f"the brokers may open {processes * pool} connections, and PostgreSQL allows "
            f"{allowed} in all",
            f'psql "$(penstock database url)" -c '
            f'"ALTER SYSTEM SET max_connections = {processes * pool * 2}" (then restart it)',
        )


def _check_disk(broker: Examined) -> Iterator[DoctorFinding]:
    if broker.config["buffer.enabled"] != "true" or broker.live["disk"] is None:
        return
    wal = (broker.live["database"] or {}).get("walPerSecond") or 0
    needed = int(max(wal, LEAST_PUSH_RATE) * BUFFER_SECONDS)
    reserve = parse_size(broker.config["buffer.free_space_reserve"])
    room = min(broker.live["disk"]["free"] - reserve, parse_size(broker.config["buffer.max_bytes"]))
    if room < needed:
        yield DoctorFinding(
            "warning",
            f"the buffer has room for {size(max(room, 0))}; {duration(BUFFER_SECONDS)} without "
            f"PostgreSQL need {size(needed)}",
            f"penstock serve --set buffer.max_bytes={needed} --set buffer.dir=DIRECTORY (of a disk "
            "that has the space)",
        )


def _check_clock(broker: Examined) -> Iterator[DoctorFinding]:
    clocks = {"this machine": broker.live["at"] / 1000 - broker.asked_at}
    if "skew" in broker.postgres:
        clocks["PostgreSQL"] = broker.postgres["skew"]
    for other, seconds in clocks.items():
        if abs(seconds) > CLOCK_SECONDS:
            yield DoctorFinding(
                "warning",
                f"the clocks of the broker and of {other} differ by {duration(abs(seconds))}: "
                "delays, schedules and tokens are wrong by that",
                "timedatectl set-ntp true",
            )


def _check_files(broker: Examined) -> Iterator[DoctorFinding]:
    limit = re.search(r"^process_max_fds (\S+)$", broker.metrics, re.M)
    wanted = int(broker.config["http_server.max_connections"])
    if limit and 0 < float(limit[1]) < wanted:
        yield DoctorFinding(
            "warning",
            f"the broker may open {float(limit[1]):.0f} files, and http_server.max_connections is "
            f"{wanted}: connections beyond are cut off",
            f"LimitNOFILE={2 * wanted} in the unit of systemd, or ulimit -Hn {2 * wanted}",
        )


def _check_parallelism(broker: Examined) -> Iterator[DoctorFinding]:
    slots: dict[tuple[str, str], int] = {}
    for one in broker.api.get("/api/v1/consumers")["consumers"]:
        key = one["queue"], one["group"]
        slots[key] = slots.get(key, 0) + (one.get("concurrency") or 1)
    for row in broker.api.get("/api/v1/consumer-groups"):
        key = row["queue"], row["name"]
        slots[key] = max(slots.get(key, 0), row["members"] or 0)
    for (queue, group), number in sorted(slots.items()):
        if number < 2:
            continue
        with contextlib.suppress(NotFound):  # deleted meanwhile
            partitions = broker.api.get("/api/v1/queues", queue, "partitions", group=group)["total"]
            options = broker.api.get("/api/v1/queues", queue)["options"]
            if partitions <= 1 and options["ordering"] != "none":
                yield DoctorFinding(
                    "warning",
                    f"{number} consumers of {queue}@{group} share one partition, and run one at a "
                    "time",
                    f"penstock queue configure {queue} ordering=none",
                )


def _check_backup(broker: Examined) -> Iterator[DoctorFinding]:
    if broker.private_directory is None:
        return
    try:
        age = time.time() - (broker.private_directory / BACKUP_RECORD).stat().st_mtime
    except FileNotFoundError:
        yield DoctorFinding("warning", "no backup has been made", "penstock backup PLACE")
        return
    if age > BACKUP_DAYS * 86_400:
        yield DoctorFinding(
            "warning", f"the last backup was made {duration(age)} ago", "penstock backup PLACE"
        )


def _check_versions(broker: Examined) -> Iterator[DoctorFinding]:
    versions = {one["version"] for one in broker.live["brokers"] if one["version"]}
    if len(versions | {__version__}) > 1:
        names = ", ".join(sorted(versions))
        yield DoctorFinding(
            "warning",
            f"the brokers have {names}, and this command {__version__}",
            f"pip install 'penstock=={max(versions | {__version__})}' everywhere",
        )


CHECKS: tuple[Callable[[Examined], Iterator[DoctorFinding]], ...] = (
    _check_access,
    _check_durability,
    _check_postgres,
    _check_retention,
    _check_disk,
    _check_backup,
    _check_parallelism,
    _check_files,
    _check_clock,
    _check_versions,
)
