"""The WebSocket protocol of topics: JSON text messages on a port of its own."""

from penstock.wire.websocket.server import WebsocketServer

__all__ = ["WebsocketServer"]
