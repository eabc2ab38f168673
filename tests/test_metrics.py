import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.metrics import Metrics


def filled() -> Metrics:
    metrics = Metrics()
    metrics.counter("penstock_x_total", "X", "kind").add(2, "a")
    metrics.gauge("penstock_depth", "Depth", read=lambda: 3)
    metrics.gauge("penstock_up", "Up", read=lambda: 1, merge="max")
    histogram = metrics.histogram("penstock_wait_seconds", "Wait", bounds=(0.1, 1.0))
    histogram.observe(0.05)
    histogram.observe(0.5)
    histogram.observe(0.5)
    histogram.observe(5.0)
    return metrics


def test_the_text_format_has_counters_gauges_and_cumulative_buckets():
    text = filled().text().decode()
    assert 'penstock_x_total{kind="a"} 2.0' in text
    assert "penstock_depth 3.0" in text
    assert 'penstock_wait_seconds_bucket{le="0.1"} 1.0' in text
    assert 'penstock_wait_seconds_bucket{le="1.0"} 3.0' in text
    assert 'penstock_wait_seconds_bucket{le="+Inf"} 4.0' in text
    assert "penstock_wait_seconds_sum 6.05" in text


def test_an_instrument_is_there_before_its_first_value():
    metrics = Metrics()
    metrics.counter("penstock_errors_total", "Errors")
    assert "penstock_errors_total 0.0" in metrics.text().decode()


def test_several_processes_add_up_and_what_is_no_share_does_not():
    merged = filled().scrape([filled().state(), filled().state()]).samples()
    assert merged['penstock_x_total{kind="a"}'] == 6
    assert merged["penstock_depth"] == 9
    assert merged["penstock_up"] == 1
    assert merged["penstock_wait_seconds_count"] == 12


def test_reading_a_merged_scrape_changes_no_process_own_numbers():
    metrics = filled()
    metrics.scrape([filled().state()]).text()
    assert metrics.samples()["penstock_depth"] == 3


def test_what_users_name_is_bounded_and_the_rest_is_added_up():
    metrics = Metrics(max_series=2)
    acked = metrics.counter("penstock_acked_total", "Acked", "queue", "status")
    for number, queue in enumerate("abcd"):
        acked.add(number + 1, queue, "ok")
    acked.add(10, "d", "failed")
    ages = {(queue,): float(number) for number, queue in enumerate("abcd")}
    metrics.gauge("penstock_age_seconds", "Age", "queue", read=lambda: ages, merge="max")
    metrics.gauge("penstock_kinds", "Kinds", "kind", read=lambda: ages)
    samples = metrics.samples()
    assert {key: value for key, value in samples.items() if "acked" in key} == {
        'penstock_acked_total{queue="a",status="ok"}': 1,
        'penstock_acked_total{queue="b",status="ok"}': 2,
        'penstock_acked_total{queue="(other)",status="ok"}': 7,
        'penstock_acked_total{queue="(other)",status="failed"}': 10,
    }
    assert samples['penstock_age_seconds{queue="(other)"}'] == 3  # ages are not added
    assert len([key for key in samples if "kinds" in key]) == 4  # ours: not bounded
    acked.add(1, "e", "ok")
    assert metrics.samples()['penstock_acked_total{queue="(other)",status="ok"}'] == 8
    assert acked.value("d", "failed") == 10  # folded where it is shown, not where it is counted


def test_one_name_is_one_instrument():
    metrics = filled()
    with pytest.raises(ValueError, match="registered twice"):
        metrics.gauge("penstock_x_total", "again")


def test_values_of_queues_are_bounded_in_memory_and_none_is_lost():
    metrics = Metrics(max_series=10)
    counter = metrics.counter("c_total", "help", "queue", "status")
    histogram = metrics.histogram("h", "help", "queue")
    fixed = metrics.counter("f_total", "help", "kind")
    for number in range(1000):
        counter.add(1, f"q{number}", "completed")
        histogram.observe(0.1, f"q{number}")
        fixed.add(1, f"k{number}")
    assert len(counter.current()) == len(histogram.current()) == 101
    assert counter.value("(other)", "completed") == 900
    assert len(fixed.current()) == 1000  # its labels are ours
    samples = metrics.samples()
    assert sum(v for name, v in samples.items() if name.startswith("c_total")) == 1000
    assert sum(v for name, v in samples.items() if name.startswith("h_count")) == 1000
    assert sum(name.startswith("c_total") for name in samples) == 11


def test_what_was_deleted_makes_room_in_all_counters_of_its_kind():
    metrics = Metrics(max_series=1)
    acked = metrics.counter("a_total", "help", "queue", "status")
    other = metrics.counter("o_total", "help", "route")
    for number in range(12):
        acked.add(1, f"q{number}", "completed")
    other.add(1, "q1")
    assert metrics.counted("queue") == {f"q{number}" for number in range(10)}
    metrics.forget("queue", "q1", "q2", "unknown")
    metrics.forget("queue")
    acked.add(3, "new", "completed")
    assert metrics.counted("queue") == {"new", "q0", *(f"q{number}" for number in range(3, 10))}
    assert acked.value("(other)", "completed") == 2
    assert other.value("q1") == 1


def test_what_threads_add_at_once_is_all_counted_and_can_be_read_meanwhile():
    metrics = Metrics()
    counter = metrics.counter("c_total", "C", "route", "number")
    histogram = metrics.histogram("h_seconds", "H", "route")
    rounds, threads = 20_000, 4
    began = threading.Barrier(threads + 1)

    def add(thread: int) -> None:
        began.wait()
        for number in range(rounds):
            counter.add(1, "r", "all")
            counter.add(1, str(thread), str(number % 500))  # often a new series
            histogram.observe(1.0, "r")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(add, thread) for thread in range(threads)]
            began.wait()
            while not all(one.done() for one in running):
                metrics.state()
                metrics.values_of("c_total")
                counter.forget("0")
            for one in running:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert counter.value("r", "all") == rounds * threads
    _, _, _, rows, _ = metrics.state()["h_seconds"]
    assert rows[0][1][-1] == rounds * threads
