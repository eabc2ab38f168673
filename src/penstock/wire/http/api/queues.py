"""The queue API as a whole: one list of routes from the modules of its nouns.

It speaks the dialect of Queen MQ 0.15 (see docs/queues-http.md): names and shapes are its, statuses
are honest.
"""

from penstock.buffer import Buffer
from penstock.queues.engine import Queues
from penstock.queues.presence import Presence
from penstock.wire.http.api import analytics, cluster, deadletters, groups, resources, stored
from penstock.wire.http.api.messages import MessagesApi
from penstock.wire.http.api.sinks import SinksApi
from penstock.wire.http.api.transactions import TransactionsApi
from penstock.wire.http.routes import Route, routes_of


def routes(queues: Queues, buffer: Buffer, presence: Presence) -> list[Route]:
    return [
        *routes_of(MessagesApi(queues, buffer)),
        *routes_of(TransactionsApi(queues, buffer)),
        *resources.routes(queues, presence),
        *groups.routes(queues),
        *deadletters.routes(queues),
        *stored.routes(queues),
        *analytics.routes(queues),
        *cluster.routes(queues, presence),
        *routes_of(SinksApi(queues.sinks)),
    ]
