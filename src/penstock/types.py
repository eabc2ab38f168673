"""The types of what the client returns, for annotations: `from penstock.types import PushResult`.

Programs catch errors from `penstock.errors` and construct what `penstock` itself exports.
"""

from penstock.client.admin import AdminClient, DeadLetterFilter
from penstock.client.buffer import BufferOptions
from penstock.client.consumer import ConsumerOptions
from penstock.client.items import PushOptions
from penstock.client.messages import Acked, AckStatus, Pushed, Received
from penstock.client.producer import Delivery, ProducerOptions
from penstock.client.reader import ReaderOptions
from penstock.client.results import (
    BrokerStatus,
    ConsumerHealth,
    Counts,
    DeadLetterMessage,
    DeadLetters,
    GroupPartition,
    PartitionSummary,
    QueueDescription,
    QueueSettings,
    QueueSummary,
    RouteStatus,
    Schedule,
    ScheduledMessage,
    ScheduledMessages,
    Seek,
    TransactionStep,
)
from penstock.client.routes import Routes
from penstock.client.schedules import Schedules
from penstock.client.sync import (
    SyncAdminClient,
    SyncProducer,
    SyncPushBuffer,
    SyncReader,
    SyncRoutes,
    SyncSchedules,
    SyncTopicGroup,
    SyncTransaction,
)
from penstock.client.topic import TopicGroup
from penstock.protocol.answers import Configured, GroupSummary, RoutePushed, ScheduleRun
from penstock.protocol.queue_options import QueueOptions

__all__ = [
    "AckStatus",
    "Acked",
    "AdminClient",
    "BrokerStatus",
    "BufferOptions",
    "Configured",
    "ConsumerHealth",
    "ConsumerOptions",
    "Counts",
    "DeadLetterFilter",
    "DeadLetterMessage",
    "DeadLetters",
    "Delivery",
    "GroupPartition",
    "GroupSummary",
    "PartitionSummary",
    "ProducerOptions",
    "PushOptions",
    "Pushed",
    "QueueDescription",
    "QueueOptions",
    "QueueSettings",
    "QueueSummary",
    "ReaderOptions",
    "Received",
    "RoutePushed",
    "RouteStatus",
    "Routes",
    "Schedule",
    "ScheduleRun",
    "ScheduledMessage",
    "ScheduledMessages",
    "Schedules",
    "Seek",
    "SyncAdminClient",
    "SyncProducer",
    "SyncPushBuffer",
    "SyncReader",
    "SyncRoutes",
    "SyncSchedules",
    "SyncTopicGroup",
    "SyncTransaction",
    "TopicGroup",
    "TransactionStep",
]
