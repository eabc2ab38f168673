"""The queue API as a whole: one list of routes from the modules of its nouns.

It speaks the dialect of Queen MQ 0.15 (see docs/queues-http.md): names and shapes are its, statuses
are honest.
"""

from penstock.buffer.maintenance import PopGate
from penstock.queues.engine import Queues
from penstock.queues.presence import Presence
from penstock.wire.http.api import (
    analytics,
    cluster,
    deadletters,
    groups,
    messages,
    resources,
    sinks,
    stored,
    transactions,
)
from penstock.wire.http.routes import Route


def routes(
    queues: Queues, pushes: messages.Pushes, gate: PopGate, presence: Presence
) -> list[Route]:
    """`pushes` stands in front of the engine for pushes: the buffer. `gate` may be closed for pops."""
    return [
        *messages.routes(queues, pushes, gate),
        *transactions.routes(queues, pushes),
        *resources.routes(queues, presence),
        *groups.routes(queues),
        *deadletters.routes(queues),
        *stored.routes(queues),
        *analytics.routes(queues),
        *cluster.routes(queues, presence),
        *sinks.routes(queues),
    ]
