"""`penstock queue` against a real broker, with input and output as a shell would connect them."""

import json

import pytest

from penstock.cli import BrokerApi
from penstock.cli.queue import commands
from tests.cli.conftest import Shell
from tests.support.cli import CliRunner

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture
def shell(broker) -> Shell:
    return Shell(broker, commands)


def test_lines_are_pushed_popped_and_acknowledged_through_pipes(shell, queue):
    pushed = shell.lines("push", queue, given='{"n": 1}\n\n{"n": 2}\n')
    assert [row["status"] for row in pushed] == ["queued", "queued"]
    popped = shell.run("pop", f"{queue}@g", "-n", "10").stdout
    assert [json.loads(line)["data"] for line in popped.splitlines()] == [{"n": 1}, {"n": 2}]
    assert [row["success"] for row in shell.lines("ack", given=popped)] == [True, True]
    assert shell.run("pop", f"{queue}@g").stdout == ""
    assert shell.lines("pop", queue, "-n", "5", "--ack", "--data") == [{"n": 1}, {"n": 2}]
    assert [row["success"] for row in shell.lines("ack", given=popped)] == [
        True,
        True,
    ]  # saying it twice is fine
    stranger = popped.replace(json.loads(popped.splitlines()[0])["transactionId"], "nobody")
    assert shell.lines("ack", given=stranger, code=1)[0]["error"] == "Message not found"


def test_payloads_may_be_arguments_and_plain_text(shell, queue):
    assert (
        shell.lines("push", queue, "[1]", "-t", "mine", "-p", "c-1")[0]["transactionId"] == "mine"
    )
    assert shell.lines("push", queue, "[1]", "-t", "mine", "-p", "c-1")[0]["status"] == "duplicate"
    shell.run("push", f"{queue}/c-1", "hello", "--text", "--quiet")
    assert shell.lines("pop", f"{queue}/c-1", "-n", "5", "--data", "--ack") == [[1], "hello"]
    assert "not JSON" in shell.run("push", queue, "hello", code=2).output
    assert "exactly one" in shell.run("push", queue, "1", "2", "-t", "x", code=2).output


def test_messages_are_pushed_with_headers_and_for_later(shell, queue):
    shell.run("push", queue, "1", "--header", "tenant=a", "-H", "n=1=2", "--quiet")
    shell.run("push", queue, "2", "--delay", "3600", "--quiet")
    shell.run("push", queue, "3", "--at", "2099-01-31T12:00:00Z", "-t", "x", "--quiet")
    (message,) = shell.lines("pop", queue, "-n", "5", "--ack")
    assert message["headers"] == {"tenant": "a", "n": "1=2"}
    assert "2099-01-31" in shell.run("messages", queue, "--scheduled").stdout
    assert "name=value" in shell.run("push", queue, "1", "-H", "tenant", code=2).output
    assert "ISO 8601" in shell.run("push", queue, "1", "--at", "noon", code=2).output


def test_a_pop_says_when_there_is_no_such_queue(shell, queue, caplog):
    assert shell.lines("pop", f"{queue}@g") == []
    assert f"nothing to take from {queue}@g: no such queue" in caplog.text
    caplog.clear()
    shell.run("push", queue, "1")
    assert len(shell.lines("pop", f"{queue}@g", "--ack")) == 1
    assert shell.lines("pop", f"{queue}@g") == []
    assert caplog.text == ""


def test_queues_are_configured_listed_described_and_deleted(shell, queue):
    (made,) = shell.lines("configure", queue, "leaseTime=30", "ordering=none", "--namespace", "ns")
    assert (made["options"]["leaseTime"], made["options"]["ordering"]) == (30, "none")
    refused = shell.run("configure", queue, "leaseTimes=3", code=1).output
    assert "unknown option: leaseTimes; did you mean leaseTime?" in refused
    refused = shell.run("configure", queue, "colour=3", code=1).output
    assert "the options are leaseTime, " in refused
    shell.run("configure", queue, "retryLimit=7")
    assert "option=value" in shell.run("configure", queue, "retryLimit", code=2).output
    shell.run("push", queue, "1", "2")
    header, row = shell.run("list", queue).stdout.splitlines()
    listed = dict(zip(header.split("\t"), row.split("\t"), strict=True))
    assert (listed["queue"], listed["waiting"], listed["namespace"]) == (queue, "2", "ns")
    (rows,) = shell.lines("list", "--json")
    assert queue in [row["name"] for row in rows]
    (about,) = shell.lines("describe", queue, "--json")
    assert (about["stored"], about["options"]["leaseTime"]) == (2, 30)
    described = shell.run("describe", queue).stdout
    assert "leaseTime\t30\n" in described
    assert "retryLimit\t7\n" in described
    assert "\npartition\twaiting\tstored\t" in described
    assert "--yes" in shell.run("delete", queue, code=2).output
    assert shell.lines("delete", queue, "--keep", "--yes")[0]["deleted"] == 2
    shell.run("delete", queue, "--yes")
    assert "there was no queue" in shell.run("delete", queue, "--yes").output
    assert f"queue '{queue}' does not exist" in shell.run("describe", queue, code=1).output


def test_a_group_is_shown_and_moved_after_a_look_at_what_that_means(shell, queue):
    shell.run("push", queue, "1", "2", "3")
    shell.run("pop", f"{queue}@g", "-n", "3", "--ack")
    (all_groups,) = shell.lines("groups", "--json")
    assert ("g", queue) in [(row["name"], row["queueName"]) for row in all_groups]
    assert f"{queue}\tDefault\t0\t" in shell.run("groups", f"{queue}@g").stdout
    (preview,) = shell.lines("seek", f"{queue}@g", "beginning", "--dry-run")
    assert (preview["redelivered"], preview["skipped"]) == (3, 0)
    assert (
        "3 messages" in shell.run("seek", f"{queue}@g", "beginning", code=2).output
    )  # nobody to ask
    assert (
        shell.lines("seek", f"{queue}@g", "2020-01-01T00:00:00Z", "--yes")[0]["partitionsUpdated"]
        == 1
    )
    assert shell.lines("pop", f"{queue}@g", "-n", "9", "--data") == [1, 2, 3]
    assert "queue@group" in shell.run("seek", queue, "end", code=2).output


def test_dead_letters_are_listed_requeued_and_purged(shell, queue):
    shell.run("configure", queue, "retryLimit=1", "retryDelay=0")
    shell.run("push", queue, '"a"', '"b"')
    for _ in range(2):
        popped = shell.run("pop", queue, "-n", "2", "--wait", "10").stdout
        shell.run("ack", "--status", "failed", "--error", "no stock", given=popped)
    (dead,) = shell.lines("dlq", "list", queue, "--json")
    assert [(row["data"], row["errorMessage"]) for row in dead] == [
        ("b", "no stock"),
        ("a", "no stock"),
    ]
    header, newest, _ = shell.run("dlq", "list", queue).stdout.splitlines()
    letter = dict(zip(header.split("\t"), newest.split("\t"), strict=True))
    assert (letter["attempts"], letter["group"]) == ("2", "(queue mode)")
    assert "2\t" in shell.run("dlq", "list", queue, "--by-error").stdout
    assert "2 in all" in shell.run("dlq", "list", queue, "-n", "1").stderr
    requeued = shell.lines("dlq", "requeue", queue, "--id", letter["id"], "--yes")
    assert requeued[0]["requeued"] == 1
    assert shell.lines("pop", queue, "--data") == ["b"]
    assert shell.lines("dlq", "list", queue, "--error", "none such", "--json") == [[]]
    assert shell.lines("dlq", "purge", queue, "--error", "none such", "--yes")[0]["deleted"] == 0
    purged = shell.lines("dlq", "purge", queue, "--error", "no stock", "--yes")
    assert purged == [{"deleted": 1, "state": "finished"}]


def test_messages_for_later_are_listed_and_cancelled(shell, queue, broker):
    item = {"queue": queue, "payload": 1, "transactionId": f"{queue}-1", "delay": 3600}
    BrokerApi(broker.url).post("/api/v1/push", body={"items": [item]})
    (row,) = shell.rows("messages", queue, "--scheduled")
    assert (row["partition"], row["transactionId"]) == ("Default", f"{queue}-1")
    shell.run("cancel", queue, "Default", f"{queue}-1")
    assert shell.rows("messages", queue, "--scheduled") == []


def test_consumers_show_how_long_their_oldest_call_runs(shell, queue, broker):
    about = {"id": queue, "name": "biller-1", "queue": queue, "group": "g"}
    about |= {"inFlight": 1, "inFlightSeconds": 1020}
    BrokerApi(broker.url).post("/api/v1/consumers", body={"consumers": [about]})
    (row,) = shell.rows("consumers", queue)
    assert (row["consumer"], row["in flight"], row["oldest call (s)"]) == ("biller-1", "1", "1020")


def test_stored_messages_are_looked_at_without_taking_them(shell, queue):
    shell.run("push", queue, '{"n": 1}', "-t", f"{queue}-1", "-p", "c-1")
    (rows,) = shell.lines("messages", queue, "--json")
    (stored,) = rows
    where = (stored["partitionId"], stored["transactionId"])
    assert (stored["partition"], where[1]) == ("c-1", f"{queue}-1")
    assert json.dumps({"n": 1}) in json.dumps(shell.lines("message", *where))
    shell.run("message", *where, "--delete", "--yes")
    assert shell.lines("messages", queue, "--json") == [[]]


def test_a_push_of_empty_standard_input_says_that_nothing_was_pushed(shell, queue):
    said = f"penstock: no messages were pushed to {queue}: standard input is empty\n"
    assert shell.run("push", queue).output == said
    assert shell.run("push", queue, "--quiet").output == ""


def test_a_group_is_forgotten(shell, queue):
    shell.run("push", queue, "1")
    shell.run("pop", f"{queue}@g", "--ack")
    assert "--yes" in shell.run("delete", f"{queue}@g", code=2).output
    shell.run("delete", f"{queue}@g", "--yes")
    assert queue not in shell.run("groups").stdout


def test_a_broker_that_is_not_there_is_said_in_one_line():
    done = CliRunner().invoke(commands, ["list", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "no broker answers at http://127.0.0.1:1" in done.output
