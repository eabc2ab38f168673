"""How results are shown: to a person, in a pipe, as JSON; and what every command offers."""

import json
import re
import time
from collections.abc import Iterator

import msgspec
import pytest
from cyclopts import App
from rich.console import Console

from penstock.cli import COMMANDS, MODULES, app, queue, route, schedule
from penstock.cli.old_words import COMMANDS as COMMANDS_OF_THE_LAST_RELEASE
from penstock.cli.old_words import current_words
from penstock.cli.tables import (
    Column,
    Facts,
    TableBlock,
    TextLine,
    View,
    count,
    duration,
    rate,
    show,
    size,
    when,
)
from penstock.contract.queues import Queue, QueueGroup
from penstock.contract.routes import RouteStatus
from penstock.contract.schedules import Schedule, ScheduleRun

ROWS = [
    {
        "name": "orders-of-the-northern-warehouse",
        "waiting": 1_234_567,
        "oldest": 850.0,
        "size": 1_288_490_189,
        "host": "broker-7.example.internal",
        "error": "gateway timeout after 3 attempts: the payment provider did not answer in time",
    },
    {
        "name": "x",
        "waiting": None,
        "oldest": 0.004,
        "size": 12,
        "host": None,
        "error": "\x1b[2J[bold]\nboom",
    },
]
COLUMNS = (
    Column("queue", "name"),
    Column("waiting", format=count),
    Column("oldest", format=duration),
    Column("size", format=size),
    Column("host", optional=True),
    Column("error", prose=True),
)


def drawn(view: View, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as taken:
        console.print(view.drawn(console))
    return taken.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_fit_the_terminal_with_numbers_to_the_right_and_no_broken_word(width):
    lines = drawn(View(ROWS, [TableBlock(COLUMNS, ROWS)]), width)
    header, first, second = lines[:3]
    assert all(len(line) <= width for line in lines)
    for title, shown in (("waiting", "1,234,567"), ("oldest", "14 min"), ("size", "1.2 GiB")):
        assert header.index(title) + len(title) == first.index(shown) + len(shown)
    assert second.split()[:2] == ["x", "-"], "what is unknown is not 0"
    assert "\\x1b[2J[bold]\\n" in second, "text from elsewhere acts on no terminal"
    words = " ".join(str(value) for value in ROWS[0].values()).split()
    for word in first.replace("…", "… ").split():
        assert (
            word.endswith("…") or word in words or word in {"1,234,567", "14", "min", "1.2", "GiB"}
        )
    if width == 80:
        assert lines[3] == "not shown at this width: host (--json has everything)"
    else:
        assert "orders-of-the-northern-warehouse" in first


def test_a_pipe_gets_a_header_plain_numbers_and_no_sentences(capsys):
    rows = [{"name": "a\tb", "rate": 12.5, "at": 1_700_000_000_000, "size": 2048, "no": None}]
    columns = (
        Column("name"),
        Column("in/s", "rate", rate),
        Column("at", format=when),
        Column("size", format=size),
        Column("no", format=count),
    )
    view = View(
        rows, [TableBlock(columns, rows), TextLine("a sentence"), Facts(columns[:2], rows[0])]
    )
    show(lambda: view)
    printed = capsys.readouterr()
    assert printed.out == (
        "name\tin/s\tat\tsize (bytes)\tno\n"
        "a\\tb\t12.5\t2023-11-14T22:13:20+00:00\t2048\t\n\n"
        "name\ta\\tb\nin/s\t12.5\n"
    )
    assert printed.err == "a sentence\n"
    show(lambda: view, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows


def test_what_happened_today_has_seconds_and_no_date():
    assert re.fullmatch(r"\d\d:\d\d:\d\d", when(time.time() * 1000))
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d", when("2023-11-14T22:13:20Z"))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0, "0 ms"), (0.0001, "< 1 ms"), (0.25, "250 ms"), (4.4, "4 s"), (119, "119 s")),
        *((840, "14 min"), (7200, "2 h"), (200_000, "2 d")),
    ],
)
def test_durations_as_people_say_them(seconds, shown):
    assert duration(seconds) == shown


def every_command() -> Iterator[tuple[str, App]]:
    for name in COMMANDS:
        __import__(f"penstock.cli.{MODULES.get(name, name)}")

    def below(group: App, words: str) -> Iterator[tuple[str, App]]:
        for name in group:
            command = group[name]
            if name.startswith("-"):
                continue
            if command.default_command:
                yield f"{words} {name}", command
            yield from below(command, f"{words} {name}")

    yield from below(app, "penstock")


def test_every_command_explains_itself_with_an_example():
    lacking = [words for words, command in every_command() if words not in command.help]
    assert lacking == []


def test_the_list_of_commands_says_what_their_modules_say():
    every = dict(every_command())
    for word, text in COMMANDS.items():
        assert app[word].help.split("\n\n")[0].replace("\n", " ") == text
        assert f"penstock {word}" in every or list(app[word])


def test_every_option_has_a_meaning_and_a_letter_means_one_thing():
    letters: dict[str, set[str]] = {"-w": set(), "-d": set()}
    for words, command in every_command():
        for one in command.assemble_argument_collection(parse_docstring=True):
            if one.show:
                assert one.parameter.help, f"{words} {one.names}"
            for letter in letters.keys() & set(one.names):
                letters[letter].add(one.name)
    assert letters == {"-w": {"--watch"}, "-d": {"--data-dir"}}


def test_an_old_command_is_a_command_of_today_and_says_so():
    commands = dict(every_command())
    for old in COMMANDS_OF_THE_LAST_RELEASE:
        said: list[str] = []
        words = current_words(old.split(), said.append)
        names = [word for word in words if not word.startswith("-") and not word.isdecimal()]
        assert " ".join(["penstock", *names]) in commands, old
        assert " ".join(words) == old or "is now" in said[0], old


def test_old_options_have_their_new_names():
    said: list[str] = []
    assert current_words(["queue", "pop", "q", "-w", "3", "-d"], said.append) == [
        *("queue", "pop", "q", "--wait", "3", "--data")
    ]
    assert current_words(["export", "status", "lake", "--watch", "1"], said.append) == [
        *("route", "list", "lake", "--watch", "--interval", "1")
    ]
    assert current_words(["topic", "tail", "t", "-n", "3"], said.append) == [
        *("topic", "consume", "t", "--last", "3")
    ]
    assert current_words(["--ca", "ca.pem", "export", "list"], said.append) == [
        *("--ca", "ca.pem", "route", "list")
    ]
    assert len(said) == 8
    assert current_words(["queue", "list", "-w"], said.append) == ["queue", "list", "-w"]
    assert len(said) == 8


def test_what_shows_a_state_can_be_watched_and_read_by_programs():
    options = {
        words: {
            name
            for one in command.assemble_argument_collection(parse_docstring=True)
            for name in one.names
        }
        for words, command in every_command()
    }
    for words, names in options.items():
        if words.split()[-1] in ("list", "status", "groups", "messages", "errors", "describe"):
            wanted = {"--json"} if words == "penstock topic describe" else {"--json", "--watch"}
            assert wanted <= names, words
        if not words.startswith("penstock pipeline run"):  # a job goes on and shows nothing
            assert "--watch" not in names or "--json" in names, words


@pytest.mark.parametrize(
    ("columns", "noun"),
    [
        (queue.FIGURES, Queue),
        (queue.GROUP_FIGURES, QueueGroup),
        (schedule.COLUMNS, Schedule),
        (schedule.RUNS, ScheduleRun),
        (route.COLUMNS, RouteStatus),
    ],
)
def test_columns_are_fields_of_the_noun_that_the_broker_answers(columns, noun):
    fields = {field.encode_name for field in msgspec.structs.fields(noun)}
    named = {
        str(one.value or one.title).partition(".")[0] for one in columns if not callable(one.value)
    }
    assert named <= fields
