"""`penstock topic verify` and `topic scrub`: check that stored records are undamaged."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli import BrokerConfig, ConfigFile, Settings, WatchApi, say
from penstock.cli.tables import Facts, View, fact, print_json
from penstock.cli.topic import JsonLines, Quiet, TopicAddress, commands, progress_bar
from penstock.cli.topic_tier import configured
from penstock.config import Config
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.log.verify import VerifyReport
    from penstock.topics.tier.verify import TierReport


@commands.command
def verify(
    *topics: str,
    data_dir: Annotated[Path, Parameter(alias="-d", env_var="PENSTOCK_DATA_DIRECTORY")] = Path(
        "penstock-data"
    ),
    live: bool = False,
    json: JsonLines = False,
    quiet: Quiet = False,
    tier: bool = False,
    shared: bool = False,
    config: ConfigFile = None,
    settings: Settings = None,
    broker: TopicAddress = TopicAddress(),
) -> None:
    """Read every file of the topics and verify checksums, offsets and indexes. Exit code 1 if
    something is damaged.

    With --tier, it verifies the objects in the tier instead; with --shared, the shared topics in
    PostgreSQL and object storage. The broker's configuration has the addresses.

    Examples:

    `penstock topic verify --data-dir /var/lib/penstock`

    `penstock topic verify orders --live --json | jq .findings`

    `penstock topic verify --tier --config penstock.yaml`

    `penstock topic verify --shared --config penstock.yaml`

    :param topics: Topics to verify; default: all.
    :param data_dir: The broker's data directory.
    :param live: The broker is running: ask it for the end of each topic, and check up to there.
    :param tier: Verify the objects in the tier instead.
    :param shared: Verify shared topics instead, in the database and in object storage.
    """
    if shared:
        loaded = BrokerConfig(config, data_dir, settings).load().config
        with progress_bar(quiet, None, "checking") as advance:
            damage = asyncio.run(_verify_shared(loaded, set(topics), lambda size: advance(size, 0)))
        _show_tier(damage, set(topics), json)
        return
    if tier:
        from penstock.object_store import ObjectStore
        from penstock.topics.tier.verify import verify_tier

        address = configured(BrokerConfig(config, data_dir, settings).load().config)
        with progress_bar(quiet, None, "checking") as advance:
            reports = verify_tier(ObjectStore(address), set(topics), lambda size: advance(size, 0))
        _show_tier(reports, set(topics), json)
        return
    from penstock.log.layout import find_logs
    from penstock.log.verify import verify as check_topic

    try:
        logs = find_logs(data_dir)
    except OSError as error:
        raise PenstockError(f"{data_dir}: {error.strerror}") from None
    if missing := sorted(set(topics) - logs.keys()):
        raise PenstockError(f"no such topic in {data_dir}: {', '.join(missing)}")
    sound = True
    with broker.connect() as client, progress_bar(quiet, None, "checking") as advance:
        for name in topics or logs:
            end = client.topic(name).info().next_offset if live else None
            done = 0

            def progress(read: int, _: int) -> None:
                nonlocal done
                advance(read - done, 0)
                done = read

            report = check_topic(logs[name], until=end, progress=progress)
            sound = sound and report.sound
            rest = f", {report.unchecked:,} of them without a checksum" if report.unchecked else ""
            _print(report, name, "", rest, json)
    if not sound:
        raise SystemExit(1)


async def _verify_shared(
    config: Config, names: set[str], progress: Callable[[int], None]
) -> "list[TierReport]":
    import asyncpg

    from penstock.config.database_url import url_here
    from penstock.object_store import ObjectStore
    from penstock.queues.schema import SCHEMA
    from penstock.topics.shared.catalog import LOGS
    from penstock.topics.shared.verify import check, report_of

    address = config.topics.shared_tier
    store = ObjectStore(address, create=False) if address else None

    async def fetch(name: str, position: int, size: int) -> bytes:
        if store is None:
            raise PenstockError("records are in object storage: configure topics.shared_tier")
        return await asyncio.to_thread(store.read_range, name, position, size)

    path = {"search_path": SCHEMA.search_path(config.database.db_schema)}
    try:
        connection = await asyncpg.connect(url_here(config), server_settings=path)
    except asyncpg.PostgresError as error:
        raise PenstockError(f"no connection to the database: {error}") from None
    try:
        reports: list[TierReport] = []
        for row in await connection.fetch(LOGS, None):
            if not names or row["topic"] in names:
                report = report_of(row)
                async for size in check(row["id"], report, connection.fetch, fetch):
                    progress(size)
                reports.append(report)
    finally:
        await connection.close()
    return reports


def _show_tier(reports: "list[TierReport]", topics: set[str], json: bool) -> None:
    missing = sorted(topics - {report.topic for report in reports})
    if missing:
        say(f"penstock: these topics are not in the tier: {', '.join(missing)}")
    for report in reports:
        rest = f", {report.unnamed} objects that are not needed" if report.unnamed else ""
        if report.missing:
            rest += f", {report.missing:,} offsets without a record"
        offsets = f"offsets {report.first_offset:,} to {report.next_offset - 1:,}, "
        _print(report, report.topic, offsets, rest, json)
    if missing or not all(report.sound for report in reports):
        raise SystemExit(1)


def _print(
    report: "VerifyReport | TierReport", topic: str, offsets: str, rest: str, json: bool
) -> None:
    if json:
        print_json(report)
        return
    verdict = "sound" if report.sound else f"{len(report.findings)} DAMAGED"
    print(f"{topic}: {verdict}: {offsets}{report.records:,} records, {report.bytes:,} bytes{rest}")
    for finding in report.findings:
        print(f"  {finding.file} at byte {finding.position:,}: {finding.what}")


@commands.command
def scrub(*, now: bool = False, api: WatchApi = WatchApi()) -> View:
    """Show the progress of the scrub, the broker's own check of sealed segments, and the result of
    the last one. Exit code 1 if there is damage.

    Example: `penstock topic scrub --now && penstock topic scrub --watch`

    :param now: Start a scrub now instead of at its scheduled time.
    """
    return _scrubbed(api.ask("POST" if now else "GET", "/api/v1/scrub"))


def _scrubbed(report: dict[str, Any]) -> View:
    current, last, due = report["current"], report["last"], report["next"]
    facts = []
    if current:
        began = _when(current["started"])
        facts.append(("running", f"since {began}: {_passed(current)}, now at {report['topic']}"))
    if last:
        facts.append(("last pass", f"ended {_when(last['finished'])}: {_passed(last)}"))
    if due is not None:
        when = _when(due) if due > time.time() else "now, or soon after the start"
        facts.append(("next pass", when))
    elif not current:
        facts.append(("next pass", "none is planned (topics.scrub_interval is 0)"))
    damaged = any(one["findings"] for one in (current, last) if one)
    return View(report, [Facts([fact(*one) for one in facts])], failed=damaged)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _passed(one: dict[str, Any]) -> str:
    unchecked = (
        f" ({one['unchecked_bytes']:,} without a checksum)" if one["unchecked_bytes"] else ""
    )
    verdict = f"{one['findings']} DAMAGED" if one["findings"] else "sound"
    return f"{verdict}, {one['segments']:,} segments, {one['bytes']:,} bytes{unchecked}"
