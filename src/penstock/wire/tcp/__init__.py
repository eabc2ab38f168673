"""Serve the binary protocol of topics. `penstock.protocol.frames` describes its bytes."""

from penstock.wire.tcp.server import TcpServer

__all__ = ["TcpServer"]
