"""The Python client: async first, with a facade for plain code. `from penstock import Client` is
the way in; what is exported here is exported there.
"""

from penstock.client.buffer import PushBuffer
from penstock.client.client import Client
from penstock.client.consumer import Consumer
from penstock.client.messages import Address, DeadLetter, Message, Retry
from penstock.client.policies import RetryPolicy, backoff
from penstock.client.producer import Producer
from penstock.client.reader import Reader
from penstock.client.stateful import State
from penstock.client.sync import SyncClient, SyncMessage, SyncTopic
from penstock.client.topic import Topic
from penstock.client.tracing import processing
from penstock.client.transactions import Transaction
from penstock.errors import PenstockError
from penstock.protocol.record_batch import Batch, Record

__all__ = [
    "Address",
    "Batch",
    "Client",
    "Consumer",
    "DeadLetter",
    "Message",
    "PenstockError",
    "Producer",
    "PushBuffer",
    "Reader",
    "Record",
    "Retry",
    "RetryPolicy",
    "State",
    "SyncClient",
    "SyncMessage",
    "SyncTopic",
    "Topic",
    "Transaction",
    "backoff",
    "processing",
]
