"""Which of Kafka's requests are served, and in which versions.

Produce is offered from version 0, although only clients from version 3 on get an answer: old
librdkafka does not compress otherwise. Versions end before topics have ids and coordinators answer
for several groups at once. Metadata ends at 8: librdkafka reserves four times the bytes of the
answer for what it makes of it, and the compact answer of version 9 is too short for that when many
topics have short names and one replica. The client then never sees a topic.
"""

from typing import NamedTuple


class KafkaApi(NamedTuple):
    name: str  # of the method that handles it, and in the metrics
    low: int
    high: int
    lowest_read: int = 0  # the first version that can be read, where it is not `low`


APIS: dict[int, KafkaApi] = {
    0: KafkaApi("produce", 0, 9, 3),
    1: KafkaApi("fetch", 4, 12),
    2: KafkaApi("list_offsets", 1, 7),
    3: KafkaApi("metadata", 0, 8),
    8: KafkaApi("offset_commit", 2, 8),
    9: KafkaApi("offset_fetch", 1, 7),
    10: KafkaApi("find_coordinator", 0, 3),
    11: KafkaApi("join_group", 0, 7),
    12: KafkaApi("heartbeat", 0, 4),
    13: KafkaApi("leave_group", 0, 4),
    14: KafkaApi("sync_group", 0, 5),
    15: KafkaApi("describe_groups", 0, 5),
    16: KafkaApi("list_groups", 0, 4),
    17: KafkaApi("sasl_handshake", 0, 1),
    18: KafkaApi("api_versions", 0, 4),
    19: KafkaApi("create_topics", 2, 6),
    20: KafkaApi("delete_topics", 1, 5),
    21: KafkaApi("delete_records", 0, 2),
    22: KafkaApi("init_producer_id", 0, 4),
    23: KafkaApi("offset_for_leader_epoch", 2, 4),
    32: KafkaApi("describe_configs", 1, 4),
    33: KafkaApi("alter_configs", 0, 2),
    35: KafkaApi("describe_log_dirs", 1, 4),
    36: KafkaApi("sasl_authenticate", 0, 2),
    37: KafkaApi("create_partitions", 0, 3),
    42: KafkaApi("delete_groups", 0, 2),
    44: KafkaApi("incremental_alter_configs", 0, 1),
    47: KafkaApi("offset_delete", 0, 0),
    60: KafkaApi("describe_cluster", 0, 1),
}
BEFORE_AUTHENTICATION = ("api_versions", "sasl_handshake", "sasl_authenticate")
