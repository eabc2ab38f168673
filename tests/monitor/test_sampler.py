"""What the charts of the Console are drawn from."""

import msgspec

from penstock.broker import Broker
from penstock.config import Config
from penstock.config.schema import DatabaseSettings
from penstock.monitor.sampler import Sampler


async def test_the_first_sample_which_has_no_rates_is_not_a_gap_in_the_chart(
    database_url, tmp_path
):
    config = Config(data_directory=tmp_path, database=DatabaseSettings(url=database_url))
    broker = Broker(config)
    await broker.start()
    try:
        sampler = Sampler(broker)
        await sampler.fresh()  # somebody lists queues long before the Console is opened
        assert history_of(sampler) == {"times": [], "series": {}}
        await sampler.fresh()
        assert history_of(sampler)["series"]["pushed"] == [0.0]
    finally:
        await broker.stop()


def history_of(sampler: Sampler) -> dict:
    return msgspec.json.decode(sampler.whole().removeprefix(b"data: "))["history"]
