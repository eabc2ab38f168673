"""A member of a group in a process of its own, which a test may kill or freeze:

python -m tests.support.kafka_member ADDRESS GROUP TOPIC FILE

It appends a line with partition and value of each record to FILE, then commits.
"""

import sys
from pathlib import Path

import confluent_kafka


def main(address: str, group: str, topic: str, path: str) -> None:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 300,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    with Path(path).open("a") as file:
        while True:
            records = [one for one in consumer.consume(20, 0.2) if one.error() is None]
            if not records:
                continue
            file.writelines(f"{one.partition()} {one.value().decode()}\n" for one in records)
            file.flush()
            try:
                consumer.commit(asynchronous=False)
            except confluent_kafka.KafkaException:
                pass  # it is no longer ours: whoever has it processes it again


if __name__ == "__main__":
    main(*sys.argv[1:])
