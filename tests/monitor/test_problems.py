"""Each kind of problem has a text, a start, and the view where it can be fixed."""

from types import SimpleNamespace

from penstock.contract.consumers import ConsumerHealth
from penstock.contract.pipelines import PipelineReport
from penstock.contract.routes import RouteStatus
from penstock.metrics import Metrics
from penstock.monitor.figures import ledger
from penstock.monitor.problems import Problems
from penstock.pipeline_registry import LOST_AFTER_SECONDS, Pipelines


def problems_of(pipelines: Pipelines, tier: SimpleNamespace | None = None) -> Problems:
    """Return the problems of a broker that is well except for its pipelines, routes and tier."""
    return Problems(broker_of(pipelines, tier))


def broker_of(pipelines: Pipelines, tier: SimpleNamespace | None = None) -> SimpleNamespace:
    topics = SimpleNamespace(disk_full=None)
    return SimpleNamespace(
        database=SimpleNamespace(healthy=True, problem=None),
        logs=SimpleNamespace(topics=topics, pipelines=pipelines, tier=tier),
        buffer=SimpleNamespace(failed=SimpleNamespace(events=0)),
        metrics=Metrics(),
    )


def test_a_pipeline_that_is_silent_is_lost_since_its_last_report(tmp_path):
    now = 1000.0
    pipelines = Pipelines(tmp_path, clock=lambda: now)
    pipelines.put("rollup", PipelineReport("running", started_at=1.0, rows=1))
    problems = problems_of(pipelines)
    assert problems.find(now, {}, {}, None, []) == []
    now += LOST_AFTER_SECONDS + 1
    (problem,) = problems.find(now, {}, {}, None, [])
    assert problem.text == "pipeline rollup is lost: it has stopped reporting"
    assert (problem.level, problem.since, problem.path) == ("error", 1_000_000, "/pipelines")


def test_a_tier_that_cannot_be_written_is_a_problem(tmp_path):
    tier = SimpleNamespace(problem="it belongs to another broker", topic_problems={"a b": "gone"})
    problems = problems_of(Pipelines(tmp_path), tier).find(10.0, {}, {}, None, [])
    assert [(one.level, one.text, one.path) for one in problems] == [
        ("error", "the tier of topics: it belongs to another broker", "/topics"),
        ("error", "topic a b is not copied to the tier: gone", "/topics/a%20b"),
    ]


def test_rejected_buffered_events_are_one_problem_while_their_number_grows(tmp_path):
    broker = broker_of(Pipelines(tmp_path))
    problems = Problems(broker)
    for at, events in ((10.0, 1), (20.0, 2)):
        broker.buffer.failed.events = events
        (problem,) = problems.find(at, {}, {}, None, [])
        assert (problem.text, problem.since) == ("the database rejected buffered events", 10_000)


def test_too_many_open_files_are_a_problem_before_connections_are_cut_off(tmp_path):
    broker = broker_of(Pipelines(tmp_path))
    opened = broker.metrics.gauge("process_open_fds", "")
    broker.metrics.gauge("process_max_fds", "").set(100)
    opened.set(90)
    problems = Problems(broker)
    assert problems.find(10.0, {}, {}, None, []) == []
    opened.set(91)
    (problem,) = problems.find(10.0, {}, {}, None, [])
    assert problem.level == "warning"
    assert "close to its limit of open files" in problem.text


def test_a_handler_that_hangs_and_handlers_that_idle_are_problems(tmp_path):
    def consumer(name: str, **more: object) -> ConsumerHealth:
        return ConsumerHealth(id=name, name=name, queue="orders", group="billing", **more)

    consumers = [
        consumer("fine", in_flight_seconds=30.0),
        consumer("hangs", in_flight_seconds=1020.0),
        consumer("idles", problem="messages wait while handlers idle. Push with partition="),
    ]
    seen = problems_of(Pipelines(tmp_path)).find(2000.0, {}, {}, None, [], consumers)
    assert [(one.text, one.since, one.path) for one in seen] == [
        (
            "a handler of orders@billing at hangs has been running for more than 10 minutes",
            980_000,
            "/queues/orders",
        ),
        (
            "group orders@billing: messages wait while handlers idle. Push with partition=",
            2_000_000,
            "/queues/orders",
        ),
    ]


def route(name, last_error, **more):
    return RouteStatus(name=name, state="paused", last_error=last_error, **more)


def test_routes_that_are_denied_failing_or_could_not_start_are_problems(tmp_path):
    problems = problems_of(Pipelines(tmp_path))
    routes = [
        route("paused", None, paused="by hand", tries_again_seconds=None),
        route("denied", None, paused="answered 401", tries_again_seconds=30),
        route("a/b", "answered 503", paused=None, tries_again_seconds=None, failing_since=5.0),
        RouteStatus(name="broken", state="failed", last_error="no such topic"),
    ]
    findings = problems.find(10.0, {}, {}, None, routes)
    assert [(one.text, one.since, one.path) for one in findings] == [
        ("route denied: answered 401", 10_000, "/routes/denied"),
        ("route a/b: answered 503", 5_000, "/routes/a%2Fb"),
        ("route broken: no such topic", 10_000, "/routes/broken"),
    ]
    assert ledger([], routes[3:]) == [], "a route that could not start has no books"
