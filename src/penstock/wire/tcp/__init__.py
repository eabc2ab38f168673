"""The binary protocol of topics, served. The bytes are described in `penstock.protocol.frames`."""

from penstock.wire.tcp.server import TcpServer

__all__ = ["TcpServer"]
