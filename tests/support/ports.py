"""Ports for servers that a test starts by their number, and starts again."""

import socket

_reserved: list[socket.socket] = []


def reserve_port() -> socket.socket:
    """A socket that is bound to a free port and never listens.

    As long as it is open, a server may listen on that port, stop, and listen again (all of them set
    SO_REUSEADDR), and the kernel gives the port to nobody who asks for any.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def free_port() -> int:
    """The number of one that is reserved until this process ends."""
    reserved = reserve_port()
    _reserved.append(reserved)
    return int(reserved.getsockname()[1])
