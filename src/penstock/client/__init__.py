"""The Python client: async first, with a facade for plain code. `from penstock import Client` is
the way in; what is exported here is exported there.
"""

from penstock.client.buffer import PushBuffer
from penstock.client.client import Client
from penstock.client.consumer import Consumer, RetryPolicy, backoff
from penstock.client.messages import (
    Acked,
    AckRefused,
    AckStatus,
    Address,
    DeadLetter,
    Message,
    Pushed,
    QueueFull,
    Received,
    Retry,
)
from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader
from penstock.client.results import (
    BrokerStatus,
    ConsumerHealth,
    Counts,
    PartitionSummary,
    QueueDescription,
    QueueSettings,
    QueueSummary,
    RouteStatus,
    Schedule,
    ScheduledMessage,
    ScheduledMessages,
    TransactionStep,
)
from penstock.client.routes import Routes
from penstock.client.schedules import Schedules
from penstock.client.stateful import State
from penstock.client.sync_client import (
    SyncClient,
    SyncMessage,
    SyncPushBuffer,
    SyncRoutes,
    SyncSchedules,
    SyncTransaction,
)
from penstock.client.sync_topics import (
    SyncProducer,
    SyncReader,
    SyncTopic,
    SyncTopicClient,
    SyncTopicGroup,
)
from penstock.client.topic import Topic, TopicGroup
from penstock.client.topics import TopicClient
from penstock.client.tracing import processing
from penstock.client.transactions import Transaction
from penstock.contract.dead_letters import DeadLetterMessage, DeadLetters
from penstock.contract.groups import Group, GroupPosition, Seek
from penstock.contract.queues import Configured
from penstock.contract.routes import RoutePushed
from penstock.contract.schedules import ScheduleRun
from penstock.errors import (
    Busy,
    Conflict,
    ConnectionLost,
    Damaged,
    Forbidden,
    Full,
    InvalidOffset,
    InvalidRequest,
    Locked,
    MissingKey,
    NotFound,
    PenstockError,
    StorageFailed,
    StorageFull,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from penstock.protocol.queue_options import QueueOptions
from penstock.protocol.record_batch import Batch, Record

__all__ = [
    "AckRefused",
    "AckStatus",
    "Acked",
    "Address",
    "Batch",
    "BrokerStatus",
    "Busy",
    "Client",
    "Configured",
    "Conflict",
    "ConnectionLost",
    "Consumer",
    "ConsumerHealth",
    "Counts",
    "Damaged",
    "DeadLetter",
    "DeadLetterMessage",
    "DeadLetters",
    "Delivery",
    "Forbidden",
    "Full",
    "Group",
    "GroupPosition",
    "InvalidOffset",
    "InvalidRequest",
    "Locked",
    "Message",
    "MissingKey",
    "NotFound",
    "PartitionSummary",
    "PenstockError",
    "Producer",
    "PushBuffer",
    "Pushed",
    "QueueDescription",
    "QueueFull",
    "QueueOptions",
    "QueueSettings",
    "QueueSummary",
    "Reader",
    "Received",
    "Record",
    "Retry",
    "RetryPolicy",
    "RoutePushed",
    "RouteStatus",
    "Routes",
    "Schedule",
    "ScheduleRun",
    "ScheduledMessage",
    "ScheduledMessages",
    "Schedules",
    "Seek",
    "State",
    "StorageFailed",
    "StorageFull",
    "SyncClient",
    "SyncMessage",
    "SyncProducer",
    "SyncPushBuffer",
    "SyncReader",
    "SyncRoutes",
    "SyncSchedules",
    "SyncTopic",
    "SyncTopicClient",
    "SyncTopicGroup",
    "SyncTransaction",
    "TooLarge",
    "Topic",
    "TopicClient",
    "TopicGroup",
    "Transaction",
    "TransactionStep",
    "Unauthorized",
    "Unavailable",
    "backoff",
    "processing",
]
