import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.values import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("1Ki", 1024),
        ("256Ki", 256 << 10),
        ("1Gi", 1 << 30),
        ("1.5Mi", 3 << 19),
        ("2K", 2000),
    ],
)
def test_sizes_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        (0.5, 0.5),
        ("100ms", 0.1),
        ("5m", 300),
        ("1h30m", 5400),
        ("2d", 172800),
        ("250us", 0.00025),
    ],
)
def test_durations_read_as_people_write_them(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1Zi", "-1", -1, "Ki", "1 2", 1.5, True, None])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1s", -1, "ms", True, None])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError):
        parse_duration(text)


@settings(deadline=None)
@given(st.integers(0, 1 << 60))
def test_a_shown_size_reads_back_as_itself(size):
    assert parse_size(format_size(size)) == size


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_a_shown_duration_reads_back_as_itself(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(
        milliseconds / 1000, rel=1e-5
    )
