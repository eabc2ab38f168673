"""Producers and consumers of shared topics on every protocol, and what each of them saw.

Producers number their records. Over TCP and Kafka they are idempotent; over HTTP and WebSocket they
are plain, and never send the same record again. Consumers are members of groups over TCP, HTTP and
Kafka; server-sent events have no groups, so that consumer remembers its offset itself.
"""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import confluent_kafka
import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from penstock.client import Client
from penstock.errors import PenstockError
from tests.support.broker import BrokerProcess

IDEMPOTENT = ("tcp", "kafka")
# A group of leases hands out the next range while one that a lost member had waits to expire.
ORDERED = ("sse", "kafka")
MAX_QUEUED = 5000  # of the Kafka client, while a broker is away
TIMEOUT = 10.0
LEASE_RECORDS = 1000


class Addresses:
    """Where brokers listen, and will again after a restart."""

    def __init__(self, brokers: list[BrokerProcess]) -> None:
        self.http = [broker.url for broker in brokers]
        self.websocket = [broker.websocket for broker in brokers]
        self.kafka = [broker.kafka for broker in brokers]


class Producers:
    """What each of them sent and what was answered, by topic."""

    def __init__(self, brokers: list[BrokerProcess], patience: float, pause: float) -> None:
        self.acked: dict[str, dict[str, int]] = {}  # value -> offset, by topic
        self.sent = Counter[str]()
        self.ending = threading.Event()
        self._addresses = Addresses(brokers)
        self._patience = patience
        self._pause = pause  # seconds between two records of a producer

    def start(self, topics: list[str]) -> list[asyncio.Task[None]]:
        per_topic = (self._over_tcp, self._over_http, self._over_websocket)
        tasks = [asyncio.create_task(work(topic)) for topic in topics for work in per_topic]
        return [*tasks, asyncio.create_task(asyncio.to_thread(self._over_kafka, topics))]

    def _value(self, topic: str, producer: str) -> str:
        key = f"{topic}/{producer}"
        self.sent[key] += 1
        return f"{producer}:{self.sent[key] - 1}"

    def _answered(self, topic: str, value: str, offset: int) -> None:
        self.acked.setdefault(topic, {})[value] = offset

    async def _over_tcp(self, topic: str) -> None:
        async with Client(
            self._addresses.http, timeout=TIMEOUT, retry_for=self._patience
        ) as client:
            while not self.ending.is_set():
                value = self._value(topic, "tcp")
                try:
                    offset = await client.topic(topic).produce(value.encode())
                except PenstockError:
                    continue  # unknown: it may be there
                self._answered(topic, value, offset)
                await asyncio.sleep(self._pause)

    async def _over_http(self, topic: str) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT) as http:
            while not self.ending.is_set():
                value = self._value(topic, "http")
                url = f"{random.choice(self._addresses.http)}/topics/{topic}/produce"
                try:
                    answer = await http.post(url, json={"payload": value})
                except httpx.HTTPError:
                    continue
                if answer.status_code == 201:
                    self._answered(topic, value, answer.json()["offset"])
                else:
                    assert answer.status_code == 503, answer.text
                    assert answer.headers["retry-after"]
                await asyncio.sleep(self._pause)

    async def _over_websocket(self, topic: str) -> None:
        request = {"command": "produce_request", "topic": topic, "req_id": 1}
        while not self.ending.is_set():
            try:
                async with (
                    asyncio.timeout(TIMEOUT) as limit,
                    connect(random.choice(self._addresses.websocket)) as socket,
                ):
                    while not self.ending.is_set():
                        value = self._value(topic, "websocket")
                        limit.reschedule(asyncio.get_running_loop().time() + TIMEOUT)
                        await socket.send(json.dumps({**request, "message_payload": value}))
                        answer = json.loads(await socket.recv())
                        if "offset" in answer:
                            self._answered(topic, value, answer["offset"])
                        await asyncio.sleep(self._pause)
            except (OSError, WebSocketException):
                await asyncio.sleep(self._pause)  # the next broker

    def _over_kafka(self, topics: list[str]) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": ",".join(self._addresses.kafka),
                "enable.idempotence": True,
                "message.timeout.ms": int(self._patience * 1000),
                "socket.timeout.ms": int(TIMEOUT * 1000),
                "linger.ms": 5,
                "log_level": 0,
            }
        )

        def delivered(topic: str, value: str) -> Callable[[Any, Any], None]:
            def note(error: Any, message: Any) -> None:
                if error is None:
                    self._answered(topic, value, message.offset())

            return note

        while not self.ending.wait(self._pause):
            if len(producer) > MAX_QUEUED:
                producer.poll(0.1)
                continue
            for topic in topics:
                value = self._value(topic, "kafka")
                producer.produce(topic, value.encode(), on_delivery=delivered(topic, value))
            producer.poll(0)
        assert producer.flush(self._patience) == 0


class Consumers:
    """What each of them got: the first offset of each value, in the order in which they came."""

    def __init__(self, brokers: list[BrokerProcess], topics: list[str]) -> None:
        self.seen = {
            name: {topic: dict[str, int]() for topic in topics}
            for name in ("tcp", "http", "sse", "kafka")
        }
        self._addresses = Addresses(brokers)
        self._topics = topics
        self._ending = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> list[asyncio.Task[None]]:
        per_topic = (self._over_tcp, self._over_http, self._over_sse)
        self._tasks = [
            asyncio.create_task(work(topic)) for topic in self._topics for work in per_topic
        ]
        self._tasks.append(asyncio.create_task(asyncio.to_thread(self._over_kafka)))
        return self._tasks

    async def stop(self) -> None:
        self._ending.set()
        *others, kafka = self._tasks
        for task in others:
            task.cancel()
        for outcome in await asyncio.gather(*others, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                assert outcome is None, outcome
        await kafka

    def _saw(self, consumer: str, topic: str, value: str, offset: int) -> None:
        known = self.seen[consumer][topic].setdefault(value, offset)
        assert known == offset, f"{consumer}: {value} at {known} and at {offset} of {topic}"

    async def _over_tcp(self, topic: str) -> None:
        async with Client(self._addresses.http, timeout=TIMEOUT) as client:
            while True:
                try:
                    async for batch in client.topic(topic).group("tcp").take():
                        for record in batch:
                            value = bytes(record.payload).decode()
                            self._saw("tcp", topic, value, record.offset)
                except PenstockError:
                    await asyncio.sleep(0.1)

    async def _over_http(self, topic: str) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT) as http:
            while True:
                try:
                    done = await self._lease(http, topic)
                except httpx.HTTPError:
                    done = False
                if not done:
                    await asyncio.sleep(0.1)

    async def _lease(self, http: httpx.AsyncClient, topic: str) -> bool:
        """Read a leased range and complete it, each request through any broker."""

        def url(path: str) -> str:
            return f"{random.choice(self._addresses.http)}/topics/{topic}/{path}"

        body = {"member": "one", "max_records": LEASE_RECORDS}
        answer = await http.post(url("groups/http/lease"), json=body)
        if answer.status_code != 200 or not (lease := answer.json()):
            return False
        offset = lease["start"]
        while offset < lease["end"]:
            params = {"offset": offset, "max_messages": LEASE_RECORDS}
            answer = await http.get(url("consume"), params=params)
            if answer.status_code != 200:
                return False  # the lease expires
            if not (records := answer.json()):
                break
            for one in records:
                if one["offset"] < lease["end"]:
                    self._saw("http", topic, one["payload"], one["offset"])
            offset = records[-1]["offset"] + 1
        answer = await http.post(url("groups/http/complete"), json={"lease": lease["lease"]})
        return answer.status_code == 200

    async def _over_sse(self, topic: str) -> None:
        offset = 0
        async with httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT, read=20.0)) as http:
            while True:
                url = f"{random.choice(self._addresses.http)}/topics/{topic}/stream"
                try:
                    async with http.stream("GET", url, params={"offset": offset}) as stream:
                        async for line in stream.aiter_lines():
                            if line.startswith("data:"):
                                record = json.loads(line[5:])
                                self._saw("sse", topic, record["payload"], record["offset"])
                                offset = record["offset"] + 1
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)

    def _over_kafka(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": ",".join(self._addresses.kafka),
                "group.id": "kafka",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
                "auto.commit.interval.ms": 500,
                "log_level": 0,
            }
        )
        consumer.subscribe(self._topics)
        while not self._ending.is_set():
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                value = message.value().decode()
                self._saw("kafka", message.topic(), value, message.offset())
        consumer.close()
