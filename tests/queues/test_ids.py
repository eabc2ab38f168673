"""The derived ids of partitions and messages."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.database import Database
from penstock.protocol.message_ids import base_of, message_uuid, partition_of, text_of
from penstock.queues.catalog import QueueCatalog
from tests.queues.support import running

INSTALLATIONS = st.integers(0, 2**32 - 1)
PARTITIONS = st.integers(1, 2**40 - 1)


def test_the_bits_of_an_id_are_where_the_table_says() -> None:
    assert str(message_uuid(0xD487E12E, 0x1234567890, 5)) == "d487e12e-1234-8567-a240-000000000005"
    assert str(message_uuid(0, 1, 2**50 - 1)) == "00000000-0000-8000-8007-ffffffffffff"


@settings(deadline=None)
@given(INSTALLATIONS, PARTITIONS, st.integers(0, 2**50 - 1))
def test_an_id_names_its_partition_and_nothing_else_does(
    installation: int, partition: int, seq: int
) -> None:
    assert text_of(base_of(installation, partition) | seq) == str(
        message_uuid(installation, partition, seq)
    )
    assert partition_of(installation, text_of(base_of(installation, partition))) == partition
    assert partition_of(installation ^ 1, text_of(base_of(installation, partition))) is None
    if seq:
        assert partition_of(installation, str(message_uuid(installation, partition, seq))) is None


async def test_the_database_makes_the_same_ids(database_url: str) -> None:
    async with running(database_url) as queues:
        for case in (
            (0xD487E12E, 0x1234567890, 5),
            (0, 1, 2**50 - 1),
            (2**32 - 1, 2**40 - 1, 0),
            (7, 4096, 2**48),
        ):
            rows = await queues.database.fetch("SELECT message_uuid($1, $2, $3)", *case)
            assert str(rows[0][0]) == str(message_uuid(*case))


@settings(deadline=None)
@given(PARTITIONS, st.integers(0, 2**50 - 1))
def test_the_short_way_to_an_id_is_the_same_id(partition: int, seq: int) -> None:
    catalog = QueueCatalog(cast(Database, SimpleNamespace(identity=0xD487E12E)))
    assert catalog.message_uuid(partition, seq) == str(message_uuid(0xD487E12E, partition, seq))
    assert catalog.partition_uuid(partition) == str(message_uuid(0xD487E12E, partition, 0))
