"""The Python client: async first, with a sync facade."""

from penstock.client.decode import Batch, Record
from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader
from penstock.client.sync import SyncTopicClient
from penstock.client.topics import TopicClient

__all__ = ["Batch", "Delivery", "Producer", "Reader", "Record", "SyncTopicClient", "TopicClient"]
