"""`penstock` for pages that are run: the real commands, each in a process of its own that is forked
from one that has imported them already. Starting Python for each would take most of the time.

    with CommandServer(directory) as server:   # makes directory/penstock, to be found in PATH
        subprocess.run(["penstock", "queue", "list"], env={"PATH": f"{directory}:..."})

The program in the path hands over its arguments, directory, environment and open files, and waits
for the exit code. `penstock serve` is the real one.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.wait import until

PROGRAM = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1:2] == ["serve"]:
    os.execv({real!r}, sys.argv)
with socket.socket(socket.AF_UNIX) as ask:
    ask.connect({socket!r})
    about = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(ask, [b"%08d" % len(about)], [0, 1, 2])
    ask.sendall(about)
    code = ask.recv(4)
sys.exit(int(code or b"137"))
"""


class CommandServer:
    def __init__(self, directory: Path) -> None:
        self._socket = directory / "commands"
        self._program = directory / "penstock"

    def __enter__(self) -> Self:
        real = str(Path(sys.executable).parent / "penstock")
        text = PROGRAM.format(python=sys.executable, socket=str(self._socket), real=real)
        self._program.write_text(text)
        self._program.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.command_server", str(self._socket)]
        )
        until(self._socket.exists, 60, "the commands are imported")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()


def serve(path: str) -> None:
    import importlib
    import pkgutil

    import penstock.cli

    for module in pkgutil.iter_modules(penstock.cli.__path__):
        importlib.import_module(f"penstock.cli.{module.name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen(16)
        os.rename(path + ".new", path)  # there when it can be connected to  # noqa: PTH104
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                answer(asking)
            asking.close()


def answer(asking: socket.socket) -> None:
    """Run the command in a child of ours and say how it ended; end it when its caller is gone."""
    size, fds, _, _ = socket.recv_fds(asking, 8, 3)
    about = b""
    while len(about) < int(size):
        about += asking.recv(int(size) - len(about))
    arguments, directory, environment = json.loads(about)
    child = os.fork()
    if child == 0:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["penstock", *arguments]
        os._exit(run())

    def watch() -> None:
        if not asking.recv(1):
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(child, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # nobody waits for it any more
        asking.sendall(b"%d" % (os.waitstatus_to_exitcode(status) % 256))
    os._exit(0)


def run() -> int:
    from penstock.__main__ import main

    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
