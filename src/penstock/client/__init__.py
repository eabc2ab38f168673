"""The Python client: async first, with a sync facade. Queues over HTTP, topics over the binary
protocol.
"""

from penstock.client.buffer import PushBuffer
from penstock.client.client import Client
from penstock.client.consumer import Consumer
from penstock.client.messages import (
    Acked,
    AckRefused,
    Address,
    DeadLetter,
    Message,
    Pushed,
    QueueFull,
    Retry,
)
from penstock.client.producer import Delivery, Producer
from penstock.client.queues import Transaction
from penstock.client.reader import Reader
from penstock.client.sync import SyncTopicClient
from penstock.client.sync_queues import SyncClient
from penstock.client.topics import TopicClient
from penstock.protocol.record_batch import Batch, Record

__all__ = [
    "AckRefused",
    "Acked",
    "Address",
    "Batch",
    "Client",
    "Consumer",
    "DeadLetter",
    "Delivery",
    "Message",
    "Producer",
    "PushBuffer",
    "Pushed",
    "QueueFull",
    "Reader",
    "Record",
    "Retry",
    "SyncClient",
    "SyncTopicClient",
    "TopicClient",
    "Transaction",
]
