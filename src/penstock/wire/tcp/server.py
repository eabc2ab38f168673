"""Listen for the binary protocol, and tune the memory allocator for its large answers."""

import ctypes

from penstock.config.schema import TcpServerSettings as Settings
from penstock.metrics import Metrics
from penstock.protocol import frames
from penstock.protocol.status import TcpStatus
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import Verifier
from penstock.wire.framed import FramedConnection
from penstock.wire.framed_server import FramedServer
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tcp.commands import Commands
from penstock.wire.tcp.connection import TcpConnection
from penstock.wire.tls import Certificate

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 128 << 20  # at the top of the heap
FROM_HEAP = 32 << 20  # blocks up to this size come from the heap


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, for the buffers of a megabyte that every FETCH needs.
    Return False if the C library has no such thresholds: then large answers are slower.

    glibc returns large freed blocks to the kernel at once, and gets them back page by page. For
    answers of 1 MiB, that was 1200 to 2400 page faults and 6 to 10 ms of system time each; with
    these thresholds it is none and 0.7 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, FROM_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))


class TcpServer(FramedServer):
    name = "TCP"
    refusal = frames.failure(
        TcpStatus.INVALID_REQUEST, "this port uses TLS: use tls:// in the address"
    )

    def __init__(
        self,
        settings: Settings,
        topics: TopicStore,
        groups: Groups,
        metrics: Metrics,
        verifier: Verifier | None = None,
        certificate: Certificate | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """Create the server. With a `verifier`, connections must begin with AUTH."""
        super().__init__(settings, metrics, verifier, certificate, memory)
        self.commands = Commands(topics, groups, metrics, settings.max_frame, verifier)
        self.last_producer: TcpConnection | None = None  # the connection that appended last

    async def start(self) -> None:
        keep_freed_memory()
        await super().start()

    def connect(self) -> TcpConnection:
        return TcpConnection(self, self.commands)

    def lost(self, connection: FramedConnection) -> None:
        super().lost(connection)
        if self.last_producer is connection:
            self.last_producer = None
