"""Which of Kafka's requests are served, and in which versions.

Produce is offered from version 0, although only clients from version 3 on get an answer: old
librdkafka does not compress otherwise. Versions end before topics have ids and coordinators answer
for several groups at once.
"""

from typing import NamedTuple


class Api(NamedTuple):
    name: str  # of the method that handles it, and in the metrics
    low: int
    high: int
    lowest_read: int = 0  # the first version that can be read, where it is not `low`


APIS: dict[int, Api] = {
    0: Api("produce", 0, 9, 3),
    1: Api("fetch", 4, 12),
    2: Api("list_offsets", 1, 6),
    3: Api("metadata", 0, 9),
    8: Api("offset_commit", 2, 8),
    9: Api("offset_fetch", 1, 7),
    10: Api("find_coordinator", 0, 3),
    11: Api("join_group", 0, 7),
    12: Api("heartbeat", 0, 4),
    13: Api("leave_group", 0, 4),
    14: Api("sync_group", 0, 5),
    15: Api("describe_groups", 0, 5),
    16: Api("list_groups", 0, 4),
    17: Api("sasl_handshake", 0, 1),
    18: Api("api_versions", 0, 4),
    19: Api("create_topics", 2, 6),
    20: Api("delete_topics", 1, 5),
    21: Api("delete_records", 0, 2),
    22: Api("init_producer_id", 0, 4),
    23: Api("offset_for_leader_epoch", 2, 4),
    32: Api("describe_configs", 1, 4),
    33: Api("alter_configs", 0, 2),
    35: Api("describe_log_dirs", 1, 4),
    36: Api("sasl_authenticate", 0, 2),
    37: Api("create_partitions", 0, 3),
    42: Api("delete_groups", 0, 2),
    44: Api("incremental_alter_configs", 0, 1),
    47: Api("offset_delete", 0, 0),
    60: Api("describe_cluster", 0, 1),
}
BEFORE_AUTHENTICATION = ("api_versions", "sasl_handshake", "sasl_authenticate")
