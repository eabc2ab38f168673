"""Which hosts a URL names, and which server a broker works on."""

from datetime import UTC, datetime

import pytest

from penstock.database.hosts import DatabaseServer, Host, Sighting, choose, hosts_of

A, B, C = Host("a", 5432), Host("b", 5432), Host("c", 5432)


def server(
    host: Host, timeline: int = 1, *, system: int = 7, writable: bool = True, second: int = 0
) -> DatabaseServer:
    started = datetime(
        2026, 1, 1, 0, host.host.encode()[0] % 60 if host.host else 0, second, tzinfo=UTC
    )
    return DatabaseServer(host, system, timeline if writable else 0, started, writable)


def sights(*seen: DatabaseServer | Host) -> list[Sighting]:
    return [
        Sighting(one, None, "does not answer") if isinstance(one, Host) else Sighting(one.host, one)
        for one in seen
    ]


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://me:p%40ss@db1,db2:5433/app", [("db1", None), ("db2", 5433)]),
        ("postgresql://me@[::1]:5433,[::2]/app", [("::1", 5433), ("::2", None)]),
        ("postgresql://me@/app?host=/run/a,/run/b&port=1,2", [("/run/a", 1), ("/run/b", 2)]),
        ("postgresql://me@/app?host=%2Frun%2Fa", [("/run/a", None)]),
        ("postgresql://me@%2Frun%2Fa/app", [("/run/a", None)]),
        ("postgresql://me@/app?host=db1,db2:7&port=6", [("db1", 6), ("db2", 7)]),
        ("postgresql:///app", [(None, None)]),
    ],
)
def test_hosts_are_read_in_every_form_of_a_url(url, hosts, monkeypatch):
    monkeypatch.delenv("PGHOST", raising=False)
    assert hosts_of(url) == [Host(*host) for host in hosts]


def test_the_server_that_takes_writes_is_used_wherever_it_is_named():
    assert choose(sights(server(A, writable=False), server(B)), None).server == server(B)
    assert choose(sights(A, server(B)), server(A)).server == server(B)
    assert choose(sights(server(A), B), server(A)).warning == ""


def test_of_two_that_take_writes_the_higher_timeline_wins_and_the_other_must_be_fenced():
    for order in ((server(A), server(B, 2)), (server(B, 2), server(A))):
        for bound in (None, server(A), server(B, 2)):
            choice = choose(sights(*order), bound)
            assert choice.server == server(B, 2)
            assert "a:5432 (timeline 1) accepts writes" in choice.warning
            assert "must be fenced" in choice.warning


def test_a_broker_never_goes_back_to_an_older_timeline():
    choice = choose(sights(server(A, 1), B), server(B, 2))
    assert choice.server is None
    assert "a:5432 (timeline 1)" in choice.reason
    assert "fenced" in choice.reason


def test_two_promoted_at_once_have_the_same_timeline_and_the_one_in_use_stays():
    choice = choose(sights(server(A, 2), server(B, 2)), server(B, 2))
    assert choice.server == server(B, 2)
    assert "a:5432" in choice.warning


def test_one_server_under_two_names_is_no_conflict():
    same = DatabaseServer(C, 7, 1, server(A).started, True)
    assert choose(sights(server(A), same), None).warning == ""


def test_a_restarted_server_is_the_same_one_again_but_not_the_same_process():
    choice = choose(sights(server(A, second=5)), server(A))
    assert choice.server == server(A, second=5) != server(A)


def test_different_clusters_are_refused_at_start_and_passed_over_later():
    choice = choose(sights(server(A), server(B, 9, system=8)), None)
    assert choice.server is None
    assert "different PostgreSQL clusters" in choice.reason
    choice = choose(sights(server(A), server(B, 9, system=8)), server(A))
    assert choice.server == server(A)
    assert "b:5432 is another PostgreSQL cluster" in choice.warning
    choice = choose(sights(A, server(B, 9, system=8)), server(A))
    assert choice.server is None
    assert "restart the broker" in choice.reason


def test_when_none_can_be_used_each_host_has_its_reason():
    choice = choose(sights(A, server(B, writable=False)), None)
    assert (
        choice.reason
        == "a:5432: does not answer; b:5432: refuses writes (a standby, or set to read only)"
    )
