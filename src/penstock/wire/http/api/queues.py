"""The queue API as a whole, from the modules of its nouns: what every process answers itself.

`penstock.wire.queen` adds what only clients of Queen MQ use.
"""

from penstock.broker import Broker
from penstock.wire.http.api.analytics import AnalyticsApi
from penstock.wire.http.api.configure import ConfigureApi
from penstock.wire.http.api.consumers import ConsumersApi
from penstock.wire.http.api.deadletters import DeadLettersApi
from penstock.wire.http.api.deliveries import DeliveriesApi
from penstock.wire.http.api.groups import GroupsApi
from penstock.wire.http.api.pushes import PushesApi
from penstock.wire.http.api.scheduled import ScheduledApi
from penstock.wire.http.api.schedules import SchedulesApi
from penstock.wire.http.api.sinks import SinksApi
from penstock.wire.http.api.stored import StoredApi
from penstock.wire.http.api.transactions import TransactionsApi
from penstock.wire.http.routes import Api
from penstock.wire.queen.cluster import ClusterApi
from penstock.wire.queen.groups import QueenGroupsApi
from penstock.wire.queen.queues import QueenQueuesApi
from penstock.wire.queen.streams import StreamsApi
from penstock.wire.queen.traces import TracesApi


def queue_apis(broker: Broker) -> list[Api]:
    queues, buffer, presence = broker.queues, broker.buffer, broker.presence
    return [
        PushesApi(buffer, queues.settings.max_items),
        DeliveriesApi(queues),
        TransactionsApi(queues, buffer),
        StreamsApi(queues, buffer),
        ConfigureApi(queues),
        QueenQueuesApi(queues, presence),
        GroupsApi(queues),
        QueenGroupsApi(queues),
        ConsumersApi(presence),
        DeadLettersApi(queues),
        StoredApi(queues),
        TracesApi(queues),
        ScheduledApi(queues.scheduled),
        AnalyticsApi(queues),
        ClusterApi(queues, presence),
        SinksApi(queues.sinks, buffer, queues.settings.max_items),
        SchedulesApi(queues.schedules),
    ]
