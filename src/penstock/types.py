"""The types that the client returns, for annotations: `from penstock.types import Pushed`.

Programs catch errors from `penstock.errors`, and construct classes from `penstock` itself.
"""

from penstock.client.admin import AdminClient, DeadLetterFilter, Routes, Schedules
from penstock.client.buffer import BufferOptions
from penstock.client.client import QueueSettings
from penstock.client.consumer import ConsumerOptions
from penstock.client.items import MessageOptions, PushOptions, TakeOptions
from penstock.client.messages import AckStatus, Received
from penstock.client.producer import Delivery, ProducerOptions
from penstock.client.reader import ReaderOptions
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
from penstock.client.transactions import TransactionStep
from penstock.contract.broker import BrokerStatus
from penstock.contract.consumers import ConsumerHealth
from penstock.contract.dead_letters import DeadLetterMessage, DeadLetters
from penstock.contract.deliveries import Acked, Pushed
from penstock.contract.groups import Group, GroupPosition, Seek
from penstock.contract.messages import ScheduledMessage, ScheduledMessages
from penstock.contract.queues import Queue, QueueDetails, QueueGroup, QueuePartition
from penstock.contract.routes import RoutePushed, RouteStatus
from penstock.contract.schedules import Schedule, ScheduleRun
from penstock.protocol.queue_options import QueueOptions

__all__ = [
    "AckStatus",
    "Acked",
    "AdminClient",
    "BrokerStatus",
    "BufferOptions",
    "ConsumerHealth",
    "ConsumerOptions",
    "DeadLetterFilter",
    "DeadLetterMessage",
    "DeadLetters",
    "Delivery",
    "Group",
    "GroupPosition",
    "MessageOptions",
    "ProducerOptions",
    "PushOptions",
    "Pushed",
    "Queue",
    "QueueDetails",
    "QueueGroup",
    "QueueOptions",
    "QueuePartition",
    "QueueSettings",
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
    "TakeOptions",
    "TopicGroup",
    "TransactionStep",
]
