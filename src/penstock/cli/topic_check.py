"""`penstock topic verify` and `topic scrub`: is what is on disk what was written?"""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import LOCAL_URL, ConfigFile, Json, Settings, Token, Url, Watch, ask
from penstock.cli.database import loaded
from penstock.cli.tables import Facts, View, fact, print_json, show
from penstock.cli.topic import DEFAULT_BROKER, Broker, _progress, _session, commands
from penstock.cli.topic_tier import configured
from penstock.protocol.names import is_topic_name

if TYPE_CHECKING:
    from penstock.topics.tier.verify import TierReport


@commands.command()
def verify(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="Topics to verify; default: all."),
    ] = None,
    data_dir: Annotated[
        Path,
        typer.Option(
            "--data-dir", envvar="PENSTOCK_DATA_DIRECTORY", help="The broker's data directory."
        ),
    ] = Path("penstock-data"),
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="The broker is running: ask it for the end of each topic, and check up to there.",
        ),
    ] = False,
    broker: Broker = DEFAULT_BROKER,
    token: Token = "",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    tier: Annotated[
        bool, typer.Option("--tier", help="Verify the objects in the tier instead.")
    ] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Read every file of the topics and verify checksums, offsets and indexes. Exit code 1 if
    something is damaged.

    With --tier, it verifies the objects in the tier instead. The broker's configuration has the
    address of the tier.

    Examples:

    `penstock topic verify --data-dir /var/lib/penstock`

    `penstock topic verify orders --live --json | jq .findings`

    `penstock topic verify --tier --config penstock.yml`
    """
    if tier:
        from penstock.object_store import ObjectStore
        from penstock.topics.tier.verify import verify_tier

        address = configured(loaded(config, data_dir, settings).config)
        with _progress(quiet, None, "checking") as advance:
            reports = verify_tier(
                ObjectStore(address), set(topics or ()), lambda size: advance(size, 0)
            )
        _show_tier(reports, set(topics or ()), json)
        return
    from penstock.log.verify import verify as check_topic

    try:
        names = sorted(
            path.name for path in data_dir.iterdir() if path.is_dir() and is_topic_name(path.name)
        )
    except OSError as error:
        typer.echo(f"penstock: {data_dir}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    missing = sorted(set(topics or ()) - set(names))
    if missing:
        typer.echo(f"penstock: no such topic in {data_dir}: {', '.join(missing)}", err=True)
        raise typer.Exit(1)
    sound = True
    with _session(broker, token) as client, _progress(quiet, None, "checking") as advance:
        for name in topics or names:
            end = client.info(name).next_offset if live else None
            done = 0

            def progress(read: int, _: int) -> None:
                nonlocal done
                advance(read - done, 0)
                done = read

            report = check_topic(data_dir / name, until=end, progress=progress)
            sound = sound and report.sound
            if json:
                print_json(report)
                continue
            unchecked = (
                f", {report.unchecked:,} of them without a checksum" if report.unchecked else ""
            )
            verdict = "sound" if report.sound else f"{len(report.findings)} DAMAGED"
            sys.stdout.write(
                f"{name}: {verdict}: {report.records:,} records, "
                f"{report.bytes:,} bytes{unchecked}\n"
            )
            for finding in report.findings:
                sys.stdout.write(f"  {finding.file} at byte {finding.position:,}: {finding.what}\n")
    if not sound:
        raise typer.Exit(1)


def _show_tier(reports: "list[TierReport]", topics: set[str], json: bool) -> None:
    missing = sorted(topics - {report.topic for report in reports})
    if missing:
        typer.echo(f"penstock: the tier has no topic {', '.join(missing)}", err=True)
    for report in reports:
        if json:
            print_json(report)
            continue
        verdict = "sound" if report.sound else f"{len(report.findings)} DAMAGED"
        unnamed = f", {report.unnamed} objects that are not needed" if report.unnamed else ""
        sys.stdout.write(
            f"{report.topic}: {verdict}: offsets {report.first_offset:,} to "
            f"{report.next_offset - 1:,}, {report.records:,} records, {report.bytes:,} bytes"
            f"{unnamed}\n"
        )
        for finding in report.findings:
            sys.stdout.write(f"  {finding.file} at byte {finding.position:,}: {finding.what}\n")
    if missing or not all(report.sound for report in reports):
        raise typer.Exit(1)


@commands.command()
def scrub(
    url: Url = LOCAL_URL,
    token: Token = "",
    now: Annotated[
        bool, typer.Option("--now", help="Start a scrub now instead of at its scheduled time.")
    ] = False,
    json: Json = False,
    watch: Watch = None,
) -> None:
    """Show the progress of the scrub, the broker's own check of sealed segments, and the result of
    the last one. Exit code 1 if it found damage.

    Example: `penstock topic scrub --now --watch`
    """
    methods = iter(["POST"] if now else [])

    def look() -> View:
        return _scrubbed(ask(url, token, next(methods, "GET"), "/api/v1/scrub"))

    shown = show(look, json, watch)
    if shown and any(one and one["findings"] for one in map(shown.data.get, ("current", "last"))):
        raise typer.Exit(1)


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
    return View(report, [Facts([fact(*one) for one in facts])])


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _passed(one: dict[str, Any]) -> str:
    unchecked = (
        f" ({one['unchecked_bytes']:,} without a checksum)" if one["unchecked_bytes"] else ""
    )
    verdict = f"{one['findings']} DAMAGED" if one["findings"] else "sound"
    return f"{verdict}, {one['segments']:,} segments, {one['bytes']:,} bytes{unchecked}"
