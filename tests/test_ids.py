from penstock.protocol import ids


def test_ids_sort_as_they_were_made():
    made = [ids.uuid7() for _ in range(5000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert {made_id.version for made_id in made} == {7}


def test_ids_keep_rising_when_the_clock_steps_back(monkeypatch):
    before = ids.uuid7()
    monkeypatch.setattr(ids.time, "time_ns", lambda: 1_000_000)
    assert ids.uuid7() > before
