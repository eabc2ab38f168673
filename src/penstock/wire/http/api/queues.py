"""The queue API as a whole: one list of routes from the modules of its nouns.

It speaks the dialect of Queen MQ 0.15 (see docs/reference/http.md): names and shapes are
its, statuses are honest.
"""

from penstock.buffer import Buffer
from penstock.queues.engine import Queues
from penstock.queues.presence import Presence
from penstock.wire.http.api import (
    analytics,
    cluster,
    deadletters,
    groups,
    resources,
    status,
    stored,
)
from penstock.wire.http.api.consumers import ConsumersApi
from penstock.wire.http.api.messages import MessagesApi
from penstock.wire.http.api.scheduled import ScheduledApi
from penstock.wire.http.api.schedules import SchedulesApi
from penstock.wire.http.api.sinks import SinksApi
from penstock.wire.http.api.transactions import TransactionsApi
from penstock.wire.http.routes import Route, routes_of


def routes(queues: Queues, buffer: Buffer, presence: Presence) -> list[Route]:
    return [
        *routes_of(MessagesApi(queues, buffer)),
        *routes_of(TransactionsApi(queues, buffer)),
        *routes_of(resources.ResourcesApi(queues)),
        *routes_of(status.StatusApi(queues, presence)),
        *routes_of(groups.GroupsApi(queues)),
        *routes_of(ConsumersApi(presence)),
        *routes_of(deadletters.DeadLettersApi(queues)),
        *routes_of(stored.StoredApi(queues)),
        *routes_of(ScheduledApi(queues.scheduled)),
        *routes_of(analytics.AnalyticsApi(queues)),
        *routes_of(cluster.ClusterApi(queues, presence)),
        *routes_of(SinksApi(queues.sinks)),
        *routes_of(SchedulesApi(queues.schedules)),
    ]
