"""A small client without an event loop, for integrations into frameworks that fork, use threads or
replace the socket module (gevent).

    brokers = BlockingBrokers(["http://127.0.0.1:6632"])
    line, settler = Line(brokers), Settler(brokers)
    popped = settler.take(line.pop([{"queue": "orders", "batch": 10}, {"queue": "mail"}], wait=30))
    for message in popped.messages:
        print(message.queue, message.data)
        settler.settle(message, "completed")
    settler.close(timeout=5)

`penstock.SyncClient` is the client for programs: it has an event loop in a thread. A `Line` is one
socket that carries one request at a time. `json` calls any operation of the HTTP API. A pop that
waits can be watched (`send_pop`, `fileno`, `wait`) and ended (`abandon`). A `Settler` has a thread,
under gevent a greenlet.
"""

from penstock.client.blocking import BlockingBrokers, Line
from penstock.client.messages import Popped
from penstock.client.settler import Settler
from penstock.net.retry import Backoff

__all__ = ["Backoff", "BlockingBrokers", "Line", "Popped", "Settler"]
