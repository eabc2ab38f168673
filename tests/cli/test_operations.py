"""Commands for people who run a broker: state, changes, tokens; on a terminal and in scripts."""

import io
import json
import os
import re
import subprocess
import sys
import time
import uuid
from typing import Any

import httpx
import psycopg
import pytest
from cryptography.hazmat.primitives import serialization
from rich.console import Console

from penstock.cli import BrokerApi, app, tables
from penstock.cli.tables import TextLine, View
from penstock.config.schema import Auth
from penstock.errors import Unavailable
from penstock.metrics import Metrics
from penstock.protocol.roles import Role
from penstock.wire.auth import Verifier
from tests.cli.conftest import Shell, Terminal
from tests.support import guard
from tests.support.cli import CliRunner
from tests.support.tokens import AUDIENCE, ISSUER, SECRET, pem, private_key
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture
def shell(broker) -> Shell:
    return Shell(broker)


@pytest.fixture
def name() -> str:
    return f"n-{uuid.uuid4().hex[:12]}"


def test_the_status_says_what_is_wrong_first_and_so_does_its_exit_code(shell, name):
    route = {"destination": {"type": "http", "url": "http://127.0.0.1:1/in"}}
    shell.run("route", "create", name, "-", given=json.dumps(route))
    try:
        shell.run("queue", "push", name, "1")
        api = BrokerApi(shell.env["PENSTOCK_URL"])
        api.post("/api/v1/routes", name, "push", body={"records": [1]})
        until(lambda: "lastError" in shell.lines("route", "list", name, "--json")[0], 30)

        def counted() -> Any:  # queues are counted beside the answer
            (about,) = shell.lines("status", "--json")
            return about["counts"]["queues"] and about

        about = until(counted, 30)
        problem = next(one for one in about["problems"] if name in one["text"])
        assert (problem["level"], problem["command"]) == ("error", f"penstock route list {name}")
        assert [one["name"] for one in about["routes"]] == [name]
        shell.run("status", "--check", code=2)
        shown = shell.run("status").stdout
        assert shown.startswith("level\twhat\tfor (s)\tcommand\nerror\t")
        for part in ("PostgreSQL", "queues", "topics", "routes", "pipelines", "buffers", "disk"):
            assert f"\n{part}\t" in shown
        assert "records wait" in shell.run("route", "delete", name, code=2).output  # nobody to ask
    finally:
        shell.run("route", "delete", name, "--force", "--yes")
    assert shell.rows("route", "list") == []

    def problems() -> list[dict[str, str]]:
        return shell.lines("status", "--json")[0]["problems"]

    until(lambda: name not in str(problems()), 30)
    levels = {one["level"] for one in problems()}  # other tests leave dead letters
    shell.run("status", "--check", code=2 if "error" in levels else 1 if levels else 0)


def test_the_status_counts_queues_without_retention(shell, name):
    shell.run("queue", "push", name, "1")
    limits = ("retentionEnabled=true", "completedRetentionSeconds=60")
    shell.run("queue", "configure", f"{name}-limited", *limits)

    def counted() -> bool:
        counts = shell.lines("status", "--json")[0]["counts"]
        return 0 < (counts["queuesWithoutRetention"] or 0) < counts["queues"]

    until(counted, 30)
    shown = shell.run("status").stdout
    assert re.search(r"^retention\t[\d,]+ of [\d,]+ queues have no retention", shown, re.M)
    for queue in (name, f"{name}-limited"):
        shell.run("queue", "delete", queue, "--yes")


def test_a_failed_pipeline_and_new_dead_letters_need_somebody(shell, name):
    api = BrokerApi(shell.env["PENSTOCK_URL"])

    def commands() -> dict[str, str]:
        problems = shell.lines("status", "--json")[0]["problems"]
        return {one["text"]: one["command"] for one in problems if name in one["text"]}

    shell.run("queue", "push", name, "1")
    assert commands() == {}
    failed = {"state": "failed", "error": "no column\n  at Spark"}
    api.put("/api/v1/pipelines", name, body=failed)
    (taken,) = api.get("/api/v1/pop/queue", name, consumerGroup="g")["messages"]
    lease = {key: taken[key] for key in ("transactionId", "partitionId", "leaseId")}
    body = {"acknowledgments": [lease | {"status": "dlq"}], "consumerGroup": "g"}
    api.post("/api/v1/ack/batch", body=body)
    expected = {
        f"pipeline {name} failed: no column": "penstock pipeline list",
        f"queue {name} has new dead letters": f"penstock queue dlq list {name} --by-error",
    }
    until(lambda: commands() == expected, 30)
    shell.run("status", "--check", code=2)
    shell.run("pipeline", "forget", name)
    shell.run("queue", "dlq", "purge", name, "--yes")
    until(lambda: commands() == {}, 30)
    task = next(row for row in shell.rows("tasks") if name in row["what"])
    assert (task["task"], task["state"], task["done"], task["of"]) == (
        "purge",
        "finished",
        "1",
        "1",
    )
    assert "is finished: 1 of 1 done" in shell.run("tasks", "--cancel", task["id"]).stderr
    shell.run("tasks", "--cancel", "nothing", code=1)


def test_a_task_that_another_broker_works_on_is_shown_and_cancelled(shell, broker, name):
    task = str(uuid.uuid4())
    with psycopg.connect(broker.database_url) as connection:
        connection.execute(
            "INSERT INTO penstock.tasks (id, kind, what, which, who, total, exact, done, broker)"
            " VALUES (%s, 'purge', %s, '{}', 'ana', 5, true, 2, 'elsewhere')",
            (task, name),
        )
    (row,) = [row for row in shell.rows("tasks") if row["id"] == task]
    assert (row["state"], row["done"], row["of"], row["who"]) == ("running", "2", "5", "ana")
    assert "is cancelled: 2 of 5 done" in shell.run("tasks", "--cancel", task).stderr
    assert ("cancelled", "2") in [(row["state"], row["done"]) for row in shell.rows("tasks")]


def test_a_check_without_a_broker_is_neither_well_nor_wrong():
    done = CliRunner().invoke(app, ["status", "--check", "--url", "http://127.0.0.1:1"])
    assert (done.exit_code, "no broker answers" in done.stderr) == (3, True)


def test_names_are_completed_in_the_shell(shell, name):
    shell.run("queue", "push", name, "1")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "__complete", "queue", "describe", name[:6]],
        env=os.environ | shell.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert name in done.stdout.split(), done.stderr


def test_what_was_just_pushed_is_listed_also_while_somebody_watches(shell, name):
    with (
        httpx.Client(base_url=shell.env["PENSTOCK_URL"], timeout=60) as broker,
        broker.stream("GET", "/api/v1/live") as live,
    ):
        next(live.iter_lines())
        for n in range(5):
            item = {"queue": f"{name}-{n}", "payload": n}
            broker.post("/api/v1/push", json={"items": [item]}).raise_for_status()
            listed = broker.get("/api/v1/queues", params={"filter": f"{name}-{n}"}).json()
            assert [row["stored"] for row in listed["queues"]] == [1]


def test_of_several_addresses_the_first_that_answers_is_asked(shell):
    url = f"http://127.0.0.1:1,{shell.env['PENSTOCK_URL']}"
    shell.run("queue", "list", "--url", url)


def test_maintenance_is_switched(shell):
    assert "pushes\tas usual\n" in shell.run("maintenance").stdout
    assert "is on" in shell.run("maintenance", "on").stderr
    try:
        assert "pushes\tto the buffer\n" in shell.run("maintenance").stdout
        assert "is on" in shell.run("maintenance", "on", "--pops").stderr
    finally:
        shell.run("maintenance", "off", "--pops")
        shell.run("maintenance", "off")
    report = shell.lines("maintenance", "--json")[0]
    assert (report["maintenanceMode"], report["popMaintenanceMode"]) == (False, False)


def test_groups_of_topics_are_shown_moved_and_forgotten(shell, name):
    shell.run("topic", "produce", name, "--quiet", given="a\nb\nc\n")
    shell.run("topic", "consume", name, "-g", "billing", "-n", "2")
    (group,) = shell.rows("topic", "groups", name)
    assert (group["group"], group["committed"], group["lag"]) == ("billing", "2", "1")
    everything = [(row["topic"], row["group"]) for row in shell.rows("topic", "groups")]
    assert (name, "billing") in everything
    assert name in [row["topic"] for row in shell.rows("topic", "list", "--sort", "-bytes")]
    asked = shell.run("topic", "seek", f"{name}@billing", "earliest", code=2).output
    assert "Deliver offsets 0 to 2" in asked
    assert "3 behind" in shell.run("topic", "seek", f"{name}@billing", "earliest", "--yes").stderr
    shell.run("topic", "seek", f"{name}@billing", "@2000-01-01T00:00:00Z", "--yes")
    assert "skip" in shell.run("topic", "seek", f"{name}@billing", "latest", code=2).output.lower()
    assert "not a position" in shell.run("topic", "seek", f"{name}@billing", "soon", code=2).output
    shell.run("topic", "delete", f"{name}@billing", "--yes")
    assert shell.rows("topic", "groups", name) == []


def test_changes_are_in_the_audit_log(shell, name):
    shell.run("queue", "configure", name)
    shell.run("queue", "delete", name, "--yes")
    for words in (("create", name), ("delete", name, "--yes")):
        shell.run("topic", *words)  # over TCP
    entries = until(lambda: [row for row in shell.rows("audit", name) if row["object"]])
    assert {"at", "who", "action", "object", "detail"} <= entries[0].keys()
    assert all(name in row["object"] for row in entries)
    actions = {row["action"]: row for row in entries}
    assert {"queue.delete", "topic.create", "topic.delete"} <= actions.keys()
    assert actions["topic.delete"]["who"] == "127.0.0.1"
    assert "TCP" in actions["topic.delete"]["detail"]
    assert shell.lines("audit", name, "--json", "-n", "1")[0][0]["object"] == entries[0]["object"]
    assert shell.rows("logs", "--limit", "5")


@pytest.mark.parametrize("kind", ["HS256", "RS256", "ES256", "EdDSA"])
def test_a_token_is_made_for_the_configured_key(kind, tmp_path):
    settings = ["auth.enabled=true", f"auth.issuer={ISSUER}", f"auth.audience={AUDIENCE}"]
    settings += ["auth.roles_claim=realm.roles", "auth.role_read_write=writer"]
    more, auth = [], {}
    if kind == "HS256":
        auth = {"secret": SECRET}
        settings.append(f"auth.secret={SECRET}")
    else:
        key = private_key(kind)
        auth = {"public_key": pem(key)}
        (tmp_path / "public.pem").write_text(pem(key))
        settings.append(f"auth.public_key={tmp_path / 'public.pem'}")
        (tmp_path / "private.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        more = ["--private-key", str(tmp_path / "private.pem")]
    words = ["token", "--role", "read-write", "--subject", "ana", "--days", "2", *more]
    done = CliRunner().invoke(app, [*words, *(x for one in settings for x in ("--set", one))])
    assert done.exit_code == 0, done.output
    verifier = Verifier(
        Auth(
            issuer=ISSUER,
            audience=AUDIENCE,
            roles_claim="realm.roles",
            role_read_write="writer",
            clock_skew=0,
            **auth,
        ),
        Metrics(),
    )
    identity = verifier.identify(done.stdout.strip())
    assert (identity.subject, identity.role) == ("ana", Role.READ_WRITE)
    assert abs(identity.expires - time.time() - 2 * 86_400) < 600


def test_a_token_needs_a_key_and_a_role():
    def said(*words: str) -> str:
        done = CliRunner(env={"JWT_SECRET": ""}).invoke(app, ["token", *words])
        assert done.exit_code != 0
        return done.output

    assert "auth.secret is not set" in said("--role", "admin", "--subject", "ana")
    assert "unknown role" in said("--role", "boss", "--subject", "ana")
    short = ("--role", "admin", "--subject", "ana", "--set", "auth.secret=short")
    assert "at least 32 bytes" in said(*short)


def test_a_view_is_watched_until_ctrl_c_and_colour_can_be_refused(shell, name):
    shell.run("queue", "push", name, "1")
    shell.run("queue", "pop", f"{name}@g", "--ack")
    watching = Terminal(
        "queue", "groups", "--watch", "--interval", "0.2", **shell.env, NO_COLOR="1"
    )
    watching.wait_for(lambda text: text.count(name) >= 3)
    watching.press("\x03")
    assert watching.exit_code() == 0
    assert "Traceback" not in watching.shown
    assert "\x1b[3" not in watching.shown, "no colours"
    assert watching.shown.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_top_sorts_by_the_key_that_is_pressed(shell, name):
    shell.run("queue", "push", name, "1")
    live = Terminal("top", **shell.env)
    live.wait_for(lambda text: "w waiting*" in text)
    live.press("p")
    live.wait_for(lambda text: "p pushed/s*" in text)
    live.press("r")
    live.press("q")
    assert live.exit_code() == 0
    assert "Traceback" not in live.shown
    assert live.shown.rstrip().endswith("\x1b[?1049l"), "the screen of before is back"


def test_top_shows_queues_beside_many_problems_on_a_small_screen(shell, name):
    api = BrokerApi(url=shell.env["PENSTOCK_URL"])
    failed = [f"{name}-{n}" for n in range(6)]
    shell.run("queue", "push", name, "1")
    try:
        for one in failed:
            api.put("/api/v1/pipelines", one, body={"state": "failed", "error": "no column " * 20})
        until(lambda: len(shell.lines("status", "--json")[0]["problems"]) >= 6, 30)
        live = Terminal("top", "--sort", "w", lines=24, **shell.env, NO_COLOR="1")
        shown = live.wait_for(lambda text: "q quit" in text and "\x1b[H" in text)
        live.press("q")
        assert live.exit_code() == 0
    finally:
        for one in failed:
            shell.run("pipeline", "forget", one)
    screen = shown[: shown.index("q quit")]
    assert "problems, 3 are shown" in screen
    assert len(re.findall(r"^\W*(?:error|warning)\b", screen, re.M)) == 3
    assert screen.count("\r\n") < 24
    assert "waiting" in screen.partition("PostgreSQL")[0], "queues come before the parts"


def test_the_demo_removes_its_data_when_it_is_terminated(shell, broker):
    command = [sys.executable, "-m", "penstock", "demo", "--rate", "1"]
    with subprocess.Popen(command, env=os.environ | shell.env) as demo:
        guard.watch(demo.pid)
        with httpx.Client(base_url=broker.url) as http:

            def made() -> list[str]:
                queues = http.get("/api/v1/queues", params={"filter": "demo-"}).json()["queues"]
                topics = [one for one in http.get("/topics").json() if one.startswith("demo-")]
                routes = http.get("/api/v1/routes").json()["routes"]
                return [one["name"] for one in (*queues, *routes)] + topics

            until(lambda: len(made()) >= 7, 60)
            demo.terminate()
            assert demo.wait(60) == 0
            assert made() == []
            schedules = http.get("/api/v1/schedules").json()["schedules"]
            assert [one for one in schedules if one["name"].startswith("demo-")] == []


def test_watching_says_when_the_broker_is_away_and_goes_on(monkeypatch):
    screen = io.StringIO()
    looks = iter(["first", Unavailable("no broker answers"), "back", KeyboardInterrupt()])

    def look() -> View:
        following = next(looks)
        if isinstance(following, BaseException):
            raise following
        return View({}, [TextLine(following)])

    monkeypatch.setattr(
        tables, "Console", lambda: Console(file=screen, force_terminal=True, width=80)
    )
    assert tables.show(look, watch=0.01) is None
    shown = screen.getvalue()
    assert shown.index("first") < shown.index("no broker answers") < shown.index("back")
