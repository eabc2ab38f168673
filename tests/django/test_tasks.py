"""Django's tasks with a real worker, on the broker's PostgreSQL and on another database."""

import time
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import fresh_database
from tests.django.conftest import Site, migrated, stop
from tests.support.broker import BrokerProcess
from tests.support.certificates import Authority
from tests.support.tokens import SECRET, token
from tests.support.wait import until


def test_the_migration_fits_the_models(site: Site) -> None:
    made = site.manage("makemigrations", "--check", "--dry-run", "penstock")
    assert made.returncode == 0, made.stdout


def test_a_task_runs_and_its_result_can_be_read(site: Site) -> None:
    worker = site.worker()
    identity = site.run("print(note.enqueue('first').id)")
    site.wait_for_ends({"first"})
    assert site.result("note", identity) == "SUCCESSFUL 1 first"
    assert site.result("waits", site.run("print(waits.enqueue('x').id)")) == "SUCCESSFUL 1 X"
    printed = site.run(
        "from asgiref.sync import async_to_sync\n"
        "identity = async_to_sync(note.aenqueue)('async').id\n"
        "print(identity, async_to_sync(note.aget_result)(identity).id)"
    )
    identity, found = printed.split()
    assert found == identity
    assert site.result("note", identity) == "SUCCESSFUL 1 async"
    context = site.run("print(attempts.enqueue('context').id)")
    assert site.result("attempts", context) == "SUCCESSFUL 1 1"
    assert stop(worker) == 0


def test_a_task_that_fails_has_its_error(site: Site) -> None:
    worker = site.worker("--threads", "1")
    for name, error in (
        ("broken", "builtins.ValueError"),
        ("bad_result", "builtins.TypeError"),
        ("exits", "builtins.SystemExit"),
        ("nul", "django.db.utils.DataError"),
        ("nul_in_its_error", "builtins.ValueError"),
    ):
        identity = site.run(f"print({name}.enqueue('x').id)")
        assert site.result(name, identity) == f"FAILED 1 {error}"
    assert stop(worker) == 0


def test_what_is_rolled_back_is_not_sent_and_what_is_committed_is(
    site: Site, api: httpx.Client
) -> None:
    site.send("roll-back", "never")
    assert site.send("die", "kept") == -9  # killed right after the commit
    site.worker()
    site.wait_for_ends({"kept"})
    site.send("note", "last")
    site.wait_for_ends({"last"})
    assert set(site.count("start")) == {"kept", "last"}
    assert site.run("print(TaskRecord.objects.filter(args=['never']).count())") == "0"


def test_a_task_can_be_delayed_and_goes_through_the_broker(site: Site, api: httpx.Client) -> None:
    site.worker()
    started = time.time()
    site.run(
        "from datetime import timedelta\n"
        "from django.utils import timezone\n"
        "note.using(run_after=timezone.now() + timedelta(seconds=4)).enqueue('later')"
    )
    totals = api.get(f"/api/v1/resources/queues/{site.prefix}default").json()["totals"]
    assert totals["scheduled"] == 1 or "later" in site.count("end")
    site.wait_for_ends({"later"})
    assert time.time() - started >= 4


def test_tasks_of_higher_priority_run_first(site: Site) -> None:
    site.run(
        "for name, priority in (('low', -60), ('usual', 0), ('high', 80), ('above', 10)):\n"
        "    note.using(priority=priority).enqueue(name)"
    )
    site.worker("--threads", "1", "--queues", "default")
    site.wait_for_ends({"low", "usual", "high", "above"})
    lines = site.ledger_path.read_text().splitlines()
    order = [line.split()[1] for line in lines if line.startswith("start")]
    assert order == ["high", "above", "usual", "low"]


def test_a_task_whose_worker_is_killed_runs_again_and_a_long_one_runs_once(
    site: Site, api: httpx.Client
) -> None:
    worker = site.worker()
    path = f"/api/v1/queues/{site.prefix}default/options"
    api.patch(path, json={"leaseTime": 2}).raise_for_status()
    second = site.worker()
    site.run("slow.enqueue('long', 6)")
    site.wait_for_ends({"long"})
    assert site.count("start")["long"] == 1
    site.run("slow.enqueue('killed', 3)")
    until(lambda: site.count("start")["killed"] == 1, 60, site.logs())
    for one in (worker, second):
        one.kill()
        one.wait()
    site.worker()
    site.wait_for_ends({"killed"})
    assert site.count("start")["killed"] == 2


def test_with_another_database_a_task_is_pushed_after_the_commit(site_on_sqlite: Site) -> None:
    site = site_on_sqlite
    site.send("roll-back", "never")
    site.send("note", "sent")
    site.worker("--threads", "1")
    site.wait_for_ends({"sent"})
    assert set(site.count("start")) == {"sent"}


def test_a_task_that_cannot_be_pushed_has_failed_and_says_why(
    site_on_sqlite: Site, api: httpx.Client
) -> None:
    site = site_on_sqlite
    queue = f"{site.prefix}default"
    options = {"ordering": "none", "maxSize": 1}
    api.post("/api/v1/configure", json={"queue": queue, "options": options}).raise_for_status()
    printed = site.run(
        "from penstock.errors import Full\n"
        "first = note.enqueue('fits').id\n"
        "try:\n"
        "    note.enqueue('too-many')\n"
        "except Full as error:\n"
        "    row = TaskRecord.objects.exclude(id=first).get()\n"
        "    print(row.id)"
    )
    status, attempts, error = site.result("note", printed).split()
    assert (status, attempts) == ("FAILED", "0")
    assert error.startswith("penstock.errors.")
    site.worker("--threads", "1", "--queues", "default")
    site.wait_for_ends({"fits"})
    assert set(site.count("start")) == {"fits"}


def test_a_task_waits_while_its_row_cannot_be_written(site_on_sqlite: Site) -> None:
    site = site_on_sqlite
    site.worker("--threads", "1", "--queues", "default")
    log = site.directory / "worker-0.log"

    def failures() -> int:
        return log.read_text().count("cannot be recorded")

    cursor = "from django.db import connection\ncursor = connection.cursor()\n"
    rename = "cursor.execute('ALTER TABLE {} RENAME TO {}')"
    site.run(
        f"{cursor}with transaction.atomic():\n    note.enqueue('waits')\n    "
        + rename.format("penstock_taskrecord", "away")
    )
    until(lambda: failures() >= 1, 60, site.logs())
    began = time.monotonic()
    until(lambda: failures() >= 3, 60, site.logs())
    assert time.monotonic() - began > 3.0  # each failure is followed by a pause of 2 s
    site.run(cursor + rename.format("away", "penstock_taskrecord"))
    site.wait_for_ends({"waits"})
    assert site.count("start") == {"waits": 1}


def test_a_full_queue_rolls_the_transaction_back(site: Site, api: httpx.Client) -> None:
    queue = f"{site.prefix}default"
    options = {"ordering": "none", "maxSize": 1}
    api.post("/api/v1/configure", json={"queue": queue, "options": options}).raise_for_status()
    printed = site.run(
        "from django.db import DatabaseError\n"
        "note.enqueue('fits')\n"
        "try:\n"
        "    with transaction.atomic():\n"
        "        note.enqueue('too-many')\n"
        "except DatabaseError as error:\n"
        "    print('is full' in str(error), TaskRecord.objects.filter(args=['too-many']).count())"
    )
    assert printed == "True 0"


def test_tasks_survive_a_killed_broker(site: Site, broker: BrokerProcess) -> None:
    # A pop whose answer the broker was sending when it died has taken messages: they come again
    # when their lease ends.
    worker = site.worker()
    options = f"/api/v1/queues/{site.prefix}default/options"
    httpx.patch(f"{broker.url}{options}", json={"leaseTime": 20}, timeout=60).raise_for_status()
    names = {f"t{number}" for number in range(20)}
    site.run(f"for name in {sorted(names)}: slow.enqueue(name, 0.5)")
    until(lambda: len(site.count("end")) >= 4, 60, site.logs())
    broker.kill()
    site.run("slow.enqueue('meanwhile', 0)")  # only the database is needed
    broker.start()
    site.wait_for_ends(names | {"meanwhile"})
    assert stop(worker) == 0
    assert set(site.count("start").values()) == {1}


def test_tls_and_a_token_work_and_a_wrong_token_ends_the_worker(
    postgres: Any, tmp_path: Path
) -> None:
    authority = Authority()
    certificate, key = authority.issue(tmp_path)
    ca, _ = authority.write(tmp_path, "ca", "ca-key")
    (tmp_path / "broker").mkdir()
    settings = {"tls__certificate": certificate, "tls__private_key": key, "auth__secret": SECRET}
    with BrokerProcess(
        tmp_path / "broker",
        database_url=fresh_database(postgres),
        auth__enabled="true",
        **settings,
    ) as own:
        url = f"https://localhost:{own.ports['http']}"
        site = migrated(Site(tmp_path, url, f"sqlite://{tmp_path}/site.db"))
        try:
            wrong = {"PENSTOCK_CA_FILE": str(ca), "PENSTOCK_TOKEN": "wrong"}
            refused = site.manage("penstock_worker", **wrong)
            assert refused.returncode != 0
            assert "CommandError" in refused.stderr
            site.environment |= wrong | {"PENSTOCK_TOKEN": token(role="read-write")}
            site.worker("--queues", "default")
            site.send("note", "secret")
            site.wait_for_ends({"secret"})
        finally:
            site.close()


def test_checks_report_wrong_settings(site: Site) -> None:
    right = site.manage("check")
    assert right.returncode == 0, right.stderr
    wrong = site.manage("check", SITE_BROKER="http://:6632")
    assert "penstock.E003" in wrong.stderr
    code = (
        "from penstock.django import Backend\n"
        "made = lambda **options: Backend('x', {'OPTIONS': options})\n"
        "ids = lambda backend: [one.id for one in backend.check()]\n"
        "print(ids(made(URLS='x')), ids(made(DATABASE='other')), ids(made(SCHEMA='no', OUTBOX=True)))\n"
        "print(ids(made(URL='127.0.0.1:6632')), ids(made(URL='http://a,ftp://b')))\n"
        "from django.test import modify_settings\n"
        "with modify_settings(INSTALLED_APPS={'remove': ['penstock.django']}):\n"
        "    print(ids(made()))"
    )
    assert site.run(code).splitlines() == [
        "['penstock.E001'] ['penstock.E004'] ['penstock.E005']",
        "['penstock.E003'] ['penstock.E003']",
        "['penstock.E002']",
    ]


def test_what_a_worker_cannot_run_becomes_a_dead_letter(site: Site, api: httpx.Client) -> None:
    site.worker()
    queue = f"{site.prefix}default"
    sent = {"id": "none", "task": "nowhere.at_all"}
    payloads = ["no task", sent, sent | {"id": "\0"}]
    items = [{"queue": queue, "payload": payload} for payload in payloads]
    api.post("/api/v1/push", json={"items": items}).raise_for_status()
    site.run(
        "identity = note.enqueue('renamed').id\n"
        "TaskRecord.objects.filter(id=identity).update(task_path='tests.django.shop.tasks.gone')"
    )

    def dead() -> list[str]:
        answer = api.get("/api/v1/dlq", params={"queue": queue}).raise_for_status().json()
        return sorted(one["errorMessage"] for one in answer["messages"])

    until(lambda: len(dead()) == 4, 60, site.logs())
    reasons = dead()
    for reason, times in (("not a task", 2), ("no row", 1), ("cannot be imported", 1)):
        assert sum(reason in one for one in reasons) == times, reasons
    site.send("note", "after")
    site.wait_for_ends({"after"})


def test_commands_say_what_is_wrong(site: Site, broker: BrokerProcess) -> None:
    queue = site.manage("penstock_worker", "--queues", "nowhere")
    assert queue.returncode != 0
    assert "no queue nowhere" in queue.stderr
    down = site.manage("penstock_worker", SITE_BROKER="http://127.0.0.1:1")
    assert down.returncode != 0
    assert "cannot connect" in down.stderr
