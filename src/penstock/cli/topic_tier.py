"""`penstock topic tier`: show, flush and take over the tier in object storage."""

import json as text
import time
from typing import Any

from cyclopts import App

from penstock.cli import BrokerConfig, JsonApi, WatchApi, Yes, confirm, usage
from penstock.cli.tables import Facts, View, fact
from penstock.cli.topic import commands as topic_commands
from penstock.config import Config

POLL_SECONDS = 0.2

commands = App(name="tier", help="Copies of topics on object storage (the tier).")
topic_commands.command(commands)


def configured(config: Config) -> str:
    """Return the address of the tier. Exits with a usage error if none is configured."""
    if not config.topics.tier:
        raise usage("no tier is configured: give --config, or --set topics.tier=s3://bucket/prefix")
    return config.topics.tier


@commands.command
def status(*, api: WatchApi = WatchApi()) -> View:
    """Show how much is in the tier, how far behind it is, and what blocks it. Exit code 1 if
    something does.

    Example: `penstock topic tier status --watch`
    """
    return _status(api.get("/api/v1/tier"))


@commands.command
def flush(*, api: JsonApi = JsonApi()) -> View:
    """Seal the active segment of each topic and copy everything to the tier, for example before you
    retire a machine. Exit code 1 if that fails.

    The command returns when everything appended before it is in the tier.

    Example: `penstock topic tier flush`
    """
    passes = api.post("/api/v1/tier/flush")["passes"]
    while True:
        view = _status(api.get("/api/v1/tier"))
        done, pending = view.data["passes"], view.data["pending_bytes"]
        # A pass that is under way may have begun before the flush.
        if view.failed or done >= passes + 2 or (done > passes and not pending):
            return view
        time.sleep(POLL_SECONDS)


@commands.command
def take_over(*, given: BrokerConfig = BrokerConfig(), yes: Yes = False) -> None:
    """Make the broker of this data directory the owner of the tier.

    The previous owner can no longer write to it. To start from the contents of the tier, use an
    empty data directory and `topics.adopt` instead.

    Example: `penstock topic tier take-over --config penstock.yaml`
    """
    from penstock.object_store import ObjectStore
    from penstock.topics.tier.owner import Ownership
    from penstock.topics.tier.tier import DIRECTORY

    config = given.load().config
    address = configured(config)
    confirm(f"Take {address} over from its owner?", yes)
    ownership = Ownership(ObjectStore(address), config.private_directory / DIRECTORY)
    before = ownership.take_over()
    of = f"broker {before.broker} on {before.host}" if before is not None else "no broker"
    print(f"{address} belonged to {of} and is written from here now.")


def _status(report: dict[str, Any]) -> View:
    late = f"late by {report['lag_seconds']:.0f} s"
    facts = [
        ("address", report["address"]),
        ("owner", "this broker" if report["owner"] else "another broker, or not known yet"),
        ("in the tier", f"{report['tier_bytes']:,} bytes"),
        ("on this disk", f"{report['local_bytes']:,} bytes"),
        ("still to copy", f"{report['pending_bytes']:,} bytes, {late}"),
    ]
    if report["problem"]:
        facts.append(("problem", report["problem"]))
    facts += [(f"topic {name}", problem) for name, problem in report["topic_problems"].items()]
    if report["adopted"]:
        facts.append(("adopted", text.dumps(report["adopted"])))
    failed = bool(report["problem"] or report["topic_problems"])
    return View(report, [Facts([fact(*one) for one in facts])], failed)
