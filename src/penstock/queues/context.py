"""Hold what all parts of a broker's queue engine share."""

from dataclasses import dataclass

from penstock.config.schema import QueuesSettings as Settings
from penstock.database import Database
from penstock.queues.calls import Calls
from penstock.queues.catalog import QueueCatalog
from penstock.queues.crypto import EncryptionKeys
from penstock.queues.waiting import WaitingPops


@dataclass(frozen=True, slots=True)
class QueueContext:
    database: Database
    settings: Settings
    catalog: QueueCatalog
    keys: EncryptionKeys
    waiting: WaitingPops
    calls: Calls
