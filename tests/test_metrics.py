import pytest

from penstock.metrics import Metrics


def filled() -> Metrics:
    metrics = Metrics()
    metrics.counter("penstock_x_total", "X", "kind").add(2, "a")
    metrics.gauge("penstock_depth", "Depth", read=lambda: 3)
    metrics.gauge("penstock_up", "Up", read=lambda: 1, merge="max")
    histogram = metrics.histogram("penstock_wait_seconds", "Wait", bounds=(0.1, 1.0))
    histogram.observe(0.05)
    histogram.observe(0.5, count=2)
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
    merged = filled().snapshot([filled().state(), filled().state()])
    assert merged['penstock_x_total{kind="a"}'] == 6
    assert merged["penstock_depth"] == 9
    assert merged["penstock_up"] == 1
    assert merged["penstock_wait_seconds_count"] == 12


def test_reading_a_merged_scrape_changes_no_process_own_numbers():
    metrics = filled()
    metrics.text([filled().state()])
    assert metrics.snapshot()["penstock_depth"] == 3


def test_one_name_is_one_instrument():
    metrics = filled()
    with pytest.raises(ValueError, match="registered twice"):
        metrics.gauge("penstock_x_total", "again")
