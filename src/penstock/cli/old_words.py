"""Commands and options of the last release under their new names.

They work for one more release, and standard error says what to write instead.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Renamed(NamedTuple):
    words: str  # what to write instead
    options: Mapping[str, str] = MappingProxyType({})  # old option -> new one


GROUPS = {"export": "route"}
COMMANDS = {
    "queue set": Renamed("queue configure"),
    "queue pop": Renamed("queue pop", {"-w": "--wait", "-d": "--data"}),
    "queue scheduled": Renamed("queue messages --scheduled"),
    "queue delete-message": Renamed("queue message --delete"),
    "queue retry-message": Renamed("queue message --retry"),
    "queue forget": Renamed("queue delete"),
    "queue dlq errors": Renamed("queue dlq list --by-error", {"--filter": "--error"}),
    "schedule describe": Renamed("schedule list"),
    "topic status": Renamed("topic list"),
    "topic tail": Renamed("topic consume --last 10", {"-n": "--last", "--count": "--last"}),
    "topic forget": Renamed("topic delete"),
    "route status": Renamed("route list"),
    "route verify": Renamed("route inspect"),
    "pipeline status": Renamed("pipeline list"),
    "pipeline run file": Renamed("pipeline run"),
    "buffer inspect": Renamed("buffer list"),
    "buffer retry-failed": Renamed("buffer replay --failed"),
    "maintenance status": Renamed("maintenance"),
    "tasks list": Renamed("tasks"),
    "tasks cancel": Renamed("tasks --cancel"),
    "token create": Renamed("token"),
    "config show": Renamed("config"),
    "config check": Renamed("config --check"),
    "database revoke": Renamed("database grant --revoke"),
    "worker": Renamed("worker", {"-d": "--directory"}),
}

FIRST_WORDS = {*GROUPS, *(words.split()[0] for words in COMMANDS)}


def current_words(words: list[str], say: Callable[[str], None]) -> list[str]:
    """Return a command line with old names replaced; `say` gets a line for each."""
    start = next((at for at, word in enumerate(words) if word in FIRST_WORDS), 0)
    options, command = words[:start], words[start:]
    if command and command[0] in GROUPS:
        command = _renamed(command, 1, GROUPS[command[0]], say)
    for length in (3, 2, 1):
        renamed = COMMANDS.get(" ".join(command[:length]))
        if renamed is None:
            continue
        rest = [_option(word, renamed.options, say) for word in command[length:]]
        if any(new in rest for new in renamed.words.split() if new.startswith("--last")):
            renamed = Renamed("topic consume")
        command = [*command[:length], *rest]
        if renamed.words != " ".join(command[:length]):
            command = _renamed(command, length, renamed.words, say)
        break
    return [*options, *_interval(command, say)]


def _renamed(words: list[str], length: int, new: str, say: Callable[[str], None]) -> list[str]:
    old = " ".join(words[:length])
    say(f"penstock: `penstock {old}` is now `penstock {new}`; the next release drops the old name")
    return [*new.split(), *words[length:]]


def _option(word: str, options: Mapping[str, str], say: Callable[[str], None]) -> str:
    if word in options:
        say(f"penstock: {word} is now {options[word]} here; the next release drops the old name")
    return options.get(word, word)


def _interval(words: list[str], say: Callable[[str], None]) -> list[str]:
    """Replace `--watch SECONDS`; a job of `pipeline run` still has that option."""
    if words[:2] == ["pipeline", "run"]:
        return words
    for at in range(len(words) - 1):
        if words[at] in ("--watch", "-w") and re.fullmatch(r"\d+(\.\d+)?", words[at + 1]):
            say("penstock: --watch SECONDS is now --watch --interval SECONDS")
            return [*words[: at + 1], "--interval", *words[at + 1 :]]
    return words
