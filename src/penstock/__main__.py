"""The `penstock` command, also as `python -m penstock`.

The command line needs cyclopts and packages of the extras, which an installation of the client
alone does not have. There, `penstock worker` works, and other commands report what to install.
"""

import os
import sys

from penstock.server import ORDER

CLIENT_COMMANDS = ("queue", "topic", "schedule", "route", "status", "top", "buffer", "token")


def main() -> None:
    """Run the command line, or as much of it as is installed."""
    if order := os.environ.pop(ORDER, ""):
        try:
            from penstock.server.process import main as serve

            sys.exit(serve(order))
        except KeyboardInterrupt:
            sys.exit(130)
    try:
        import cyclopts  # noqa: F401
    except ModuleNotFoundError:
        sys.exit(_without_cyclopts(sys.argv[1:]))
    from penstock.cli import main as command_line

    command_line()


def _without_cyclopts(words: list[str]) -> int:
    if words[:1] == ["worker"]:
        from penstock.worker import main as worker

        return worker(words[1:])
    from penstock import __version__

    if words == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return 0
    command = words[0] if words and not words[0].startswith("-") else ""
    extra = (
        "pipeline" if command == "pipeline" else "cli" if command in CLIENT_COMMANDS else "server"
    )
    sys.stderr.write(
        f"penstock: this is the client {__version__}, with `penstock worker`. "
        f"For `penstock {command or '--help'}` first: pip install 'penstock[{extra}]'\n"
    )
    return 2


if __name__ == "__main__":
    main()
