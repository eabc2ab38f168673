"""Run the processes beside the owner, if `workers` is more than one.

Each gets the owner's effective configuration, with the actual port and database address, on its
standard input. It ends when that input ends, so a killed owner leaves no worker behind. A worker
that dies is started again.
"""

import asyncio
import dataclasses
import logging
import pickle
import signal
import struct
import sys
from functools import partial

import uvloop

from penstock.broker import Broker
from penstock.config import Config
from penstock.io.parent import watch_parent
from penstock.io.tasks import cancelled, supervised
from penstock.logging import set_up
from penstock.wire.listeners import Listeners, SocketPaths

log = logging.getLogger("penstock.workers")

RESTART_SECONDS = (0.1, 0.5, 1.0, 5.0)


class WorkerProcesses:
    """Keep `workers - 1` processes running from `start` to `stop`."""

    def __init__(self, config: Config, broker: Broker, listeners: Listeners) -> None:
        self._count = config.workers - 1
        self._config = config
        self._broker = broker
        self._listeners = listeners
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # by number, once ready

    async def start(self) -> None:
        if self._count < 1:
            return
        database = dataclasses.replace(self._config.database, url=self._broker.database.url)
        http = dataclasses.replace(self._config.http_server, port=self._listeners.http_port)
        config = dataclasses.replace(self._config, database=database, http_server=http)
        ready = [asyncio.Event() for _ in range(self._count)]
        for number, event in enumerate(ready, start=1):
            order = pickle.dumps((config, number, self._listeners.sockets))
            keep = partial(self._keep_running, number, order, event)
            self._keepers.append(supervised(f"worker {number}", keep, self._broker.metrics))
        await asyncio.gather(*(event.wait() for event in ready))

    def renew(self) -> None:
        """Make all workers read their certificates again."""
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        await cancelled(*self._keepers)

    async def _keep_running(self, number: int, order: bytes, ready: asyncio.Event) -> None:
        failures = 0
        while True:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from penstock.server.workers import main; main()"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Ctrl-C on the terminal must reach only the owner, which stops the workers
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(struct.pack(">I", len(order)) + order)
                if await process.stdout.readline():
                    self._processes[number] = process
                    ready.set()
                    failures = 0
                    log.info("worker %d is ready (process %d)", number, process.pid)
                await process.wait()
            except asyncio.CancelledError:
                await _end(process, self._config.shutdown_delay + self._config.shutdown_timeout + 5)
                raise
            pause = RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
            failures += 1
            log.error(
                "worker %d ended with code %s; starting it again in %.1f s",
                number,
                process.returncode,
                pause,
            )
            await asyncio.sleep(pause)


async def _end(process: asyncio.subprocess.Process, patience: float) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            process.kill()
            await process.wait()


def main() -> None:
    (length,) = struct.unpack(">I", sys.stdin.buffer.read(4))
    config, number, sockets = pickle.loads(sys.stdin.buffer.read(length))
    set_up(config.log_level, config.log_format)
    uvloop.run(_work(config, number, sockets))


async def _work(config: Config, number: int, sockets: SocketPaths) -> None:
    stop = asyncio.Event()
    delay = config.shutdown_delay
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def on_owner_end() -> None:
        nonlocal delay
        delay = 0.0  # the next owner may run already, and would share its port with this worker
        stop.set()

    watch_parent(lambda: loop.call_soon_threadsafe(on_owner_end))
    broker = Broker(config, owner=False, worker=number)
    await broker.start()
    listeners = Listeners(broker, worker=number, sockets=sockets)
    try:
        await listeners.start()
        loop.add_signal_handler(signal.SIGHUP, listeners.certificates.reload)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await listeners.stop(config.shutdown_timeout, delay)
        await broker.stop()
