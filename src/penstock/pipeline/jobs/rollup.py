"""rollup: figures per minute of every queue, group and topic, for the table behind
/api/v1/analytics.

    topics   records and bytes by append time, read through the topic source
    queues   messages pushed (the broker's counters) and bytes (the stored messages, counted in
             PostgreSQL by tasks that each take some partitions and some of the time)
    groups   acknowledged, failed, retried, dead and dropped messages, latencies from push to ack,
             and lag, from the history that the broker's upkeep folds every few seconds
    groups on topics    committed records, latencies from append to commit, records handed out
             again, and lag, from the minutes that the broker counts as groups commit
             (`penstock.topics.group_history`)

Incremental and idempotent: a run begins a little before the last one ended, and a minute that is
rolled up again replaces itself. Counts are never made smaller by that, because what a source can
say about a minute only ever shrinks: retention, compaction and the history's week take away what
was counted before.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from penstock.errors import InvalidRequest, NotFound
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.jobs import MINUTE, Say, minute_of, moment, postgres_frames, quiet
from penstock.pipeline.jobs import rollup_minutes as minutes
from penstock.pipeline.jobs.postgres_frames import ROWS_PER_STATEMENT, queue_ids
from penstock.pipeline.options import TopicSourceOptions, read_options
from penstock.pipeline.session import activate
from penstock.pipeline.sources.postgres import Postgres
from penstock.pipeline.sources.topic_catalog import Topics

# Between runs: longer than counters wait to be folded and commits can be late.
OVERLAP = timedelta(minutes=5)
FIRST_RUN = timedelta(days=1)  # how far back the first run reads
TASKS = 8

OF_TOPIC_GROUPS = {  # columns, and what the broker's minutes call them
    "minute": "time",
    "name": "topic",
    "group_name": "group",
    **{name: name for name in ("acked", "retried", "lag")},
    "latency_buckets": "buckets",
    "latency_counts": "counts",
}
COUNTS = ("pushed", "bytes", "acked", "failed", "retried", "dead", "dropped")
_SAME = "minute, kind, name, group_name"
_KEPT = ", ".join(f"{name} = greatest(a.{name}, excluded.{name})" for name in COUNTS)
WRITE = f"""
  INSERT INTO analytics AS a ({_SAME}, {", ".join(COUNTS)}, lag, latency_buckets, latency_counts)
  SELECT {_SAME}, {", ".join(f"coalesce({name}, 0)" for name in COUNTS)}, lag,
         latency_buckets, latency_counts
    FROM jsonb_to_recordset($1::jsonb) AS r (
         minute timestamptz, kind text, name text, group_name text,
         {", ".join(f"{name} bigint" for name in COUNTS)}, lag bigint,
         latency_buckets smallint[], latency_counts bigint[])
   ORDER BY 1, 2, 3, 4
  ON CONFLICT ({_SAME}) DO UPDATE SET {_KEPT}, lag = coalesce(excluded.lag, a.lag),
    latency_buckets = CASE WHEN excluded.acked >= a.acked
                           THEN excluded.latency_buckets ELSE a.latency_buckets END,
    latency_counts = CASE WHEN excluded.acked >= a.acked
                          THEN excluded.latency_counts ELSE a.latency_counts END"""

# A run that leaves out what is before it does not count: the next one still begins where the last
# whole one ended.
REACHED = """
  INSERT INTO rollups AS r (scope, upto) SELECT $1, $3::text::timestamptz
  ON CONFLICT (scope) DO UPDATE
     SET upto = greatest(r.upto, excluded.upto), ran_at = clock_timestamp()
   WHERE r.upto >= $2::text::timestamptz"""

FORGET = """
  WITH gone AS (DELETE FROM analytics WHERE minute < now() - make_interval(days => {}) RETURNING 1)
  SELECT count(*) FROM gone"""


@dataclass
class RollupResult:
    since: datetime
    until: datetime
    queues: int = 0
    groups: int = 0
    topics: int = 0
    rows: int = 0  # written to the table: one per minute and queue, group or topic
    forgotten: int = 0  # rows older than `keep_days`, deleted


@dataclass(frozen=True, slots=True)
class RollupOptions:
    database: str | None = None
    broker: str | None = None
    url: str | None = None
    token: str | None = None
    queues: Sequence[str] = ()
    topics: Sequence[str] = ()
    since: str | datetime | None = None
    until: str | datetime | None = None
    keep_days: int | None = None
    tasks: int = TASKS


def rollup(spark: Any, options: RollupOptions, say: Say = quiet) -> RollupResult:
    """Roll up whole minutes from `since` (where the last run ended) to `until` (now).

    Without `queues` and `topics` it takes all of both; topics only when `broker` is given, their
    groups when `url` is.
    """
    postgres = postgres_frames.database_at(options.database)
    if options.topics and not options.broker:
        raise InvalidRequest("give the broker's address: topics are read from it")
    postgres.rows("SELECT queue_rollup()")
    scopes = [f"queue:{name}" for name in options.queues]
    scopes += [f"topic:{name}" for name in options.topics]
    scopes = scopes or ["queues", *(["topics"] if options.broker else [])]
    start, end = _window(postgres, scopes, options.since, options.until)
    done = RollupResult(start, end)
    if start >= end:
        return done
    spark = activate(spark)
    window = f"{start:%F %H:%M} to {end:%F %H:%M} UTC"
    if options.queues or not options.topics:
        catalog = _catalog(postgres, options.queues)
        done.queues, done.groups = len(catalog.queues), sum(map(len, catalog.groups.values()))
        if catalog.queues:
            say(f"{done.queues} queues with {done.groups} groups, {window}")
            made = minutes.queue_minutes(spark, postgres, catalog, start, end, options.tasks)
            done.rows += postgres_frames.write(made, postgres, WRITE)
    if options.broker and (options.topics or not options.queues):
        names = _topic_names(options.broker, options.token, options.topics)
        done.topics = len(names)
        if names:
            say(f"{done.topics} topics, {window}")
            made = minutes.topic_minutes(spark, options.broker, options.token, names, start, end)
            done.rows += postgres_frames.write(made, postgres, WRITE)
            if options.url:
                with BrokerCaller(options.url, token=options.token, patience=10.0) as caller:
                    done.rows += _topic_groups(postgres, caller, set(options.topics), start, end)
    for scope in scopes:
        postgres.rows(REACHED, (scope, start.isoformat(), end.isoformat()))
    if options.keep_days is not None:
        ((done.forgotten,),) = postgres.rows(FORGET.format(int(options.keep_days)))
    return done


def _window(
    postgres: Postgres,
    scopes: list[str],
    since: str | datetime | None,
    until: str | datetime | None,
) -> tuple[datetime, datetime]:
    ((now,),) = postgres.rows("SELECT clock_timestamp()")
    end = minute_of(now)
    if until:
        # the current minute, if it is requested
        end = min(minute_of(moment(until, now, "until")), end + MINUTE)
    if since:
        return minute_of(moment(since, now, "since")), end
    ends: dict[str, datetime] = dict(postgres.rows("SELECT scope, upto FROM rollups"))
    never = now - FIRST_RUN + OVERLAP
    reached = [
        max(ends.get(scope, never), ends.get(scope.partition(":")[0] + "s", never))
        for scope in scopes
    ]
    return minute_of(min(reached) - OVERLAP), end


def _catalog(postgres: Postgres, names: Sequence[str]) -> minutes.Catalog:
    queues = {number: name for name, number in queue_ids(postgres, names).items()}
    groups: dict[int, dict[int, str]] = {number: {} for number in queues}
    for number, queue, name in postgres.rows("SELECT id, queue_id, name FROM groups"):
        if queue in queues:
            groups[queue][number] = name
    return minutes.Catalog(queues, groups)


def _topic_groups(
    postgres: Postgres, caller: BrokerCaller, topics: set[str], start: datetime, end: datetime
) -> int:
    """Copy the figures of groups on topics, which the broker keeps for minutes with commits."""
    times = urlencode({"from": start.isoformat(), "to": end.isoformat()})
    rows = [
        {"kind": "topic", **{column: minute[key] for column, key in OF_TOPIC_GROUPS.items()}}
        for minute in caller.json("GET", f"/api/v1/analytics/topic-groups?{times}")
        if not topics or minute["topic"] in topics
    ]
    for begin in range(0, len(rows), ROWS_PER_STATEMENT):
        postgres.rows(WRITE, (json.dumps(rows[begin : begin + ROWS_PER_STATEMENT]),))
    return len(rows)


def _topic_names(broker: str, token: str | None, topics: Sequence[str]) -> list[str]:
    given = {"broker": broker, "topicPattern": ".*", "brokerTimeout": "10", "token": token or ""}
    options = read_options(TopicSourceOptions, given)
    with closing(Topics(options)) as catalog:
        names = catalog.names()
    for name in topics:
        if name not in names:
            raise NotFound(f"topic {name!r} does not exist on {broker}")
    return list(topics) or names
