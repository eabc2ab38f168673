"""Every code block of the docs is run, parsed, or says why not; and what is not run names commands
and addresses that exist.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlglot
import yaml

from tests.conftest import fresh_database
from tests.docs.blocks import Block, blocks, everything, pages, prints
from tests.docs.command_server import CommandServer
from tests.docs.runner import PageRunner, clean_environment
from tests.docs.tools import ROOT, tool
from tests.support.broker import BrokerProcess
from tests.support.ports import free_port

pytestmark = pytest.mark.xdist_group("docs")
TUTORIAL = ROOT / "docs" / "start" / "tutorial.md"
RUN_PAGES = [page for page in pages() if any(block.is_run for block in blocks(page))]
PARSERS = {
    "json": lambda text: [json.loads(part) for part in re.split(r"\n(?=[{\[])", text.strip())],
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "toml": tomllib.loads,
    "sql": lambda text: sqlglot.parse(text, dialect="postgres"),
}
GLOBAL = {"--ca", "--client-cert", "--client-key"}  # options that stand before the command
MARKS = {"", "not run", "run by", "file", "background", "appears there"}
BEFORE = {  # what the reader of a recipe has before it, besides `client`
    "stuck-group.md": "client.push('orders', 1)",
    "moving.md": "from pathlib import Path; Path('copy-of-the-data').mkdir()",
}
RUN_BY_SPARK = "<!-- run by: tests/pipeline/test_docs.py -->\n"
BLOCK_SECONDS = 600  # one block may take, with an environment to set up
READ = {"text", "ini"}  # not code, or no language of ours


def test_every_block_says_what_it_is() -> None:
    strange = [
        f"{block.name}: {block.language or 'no language'}"
        for block in everything()
        if block.language not in {"bash", "python", *PARSERS, *READ}
    ]
    assert strange == [], "name a language, or text"


def test_every_mark_is_known_and_gives_a_reason() -> None:
    for block in everything():
        assert block.kind in MARKS, f"{block.name}: {block.kind}"
        if block.kind in ("not run", "file"):
            assert len(block.about) > 2, f"{block.name} says no more than {block.kind!r}"
        if block.kind == "run by":
            test = (ROOT / block.about).read_text()
            page = str(block.page.relative_to(ROOT))
            assert page in test, f"{block.name}: {block.about} does not run {page}"


def test_data_in_the_docs_parses() -> None:
    for block in everything():
        if block.language in PARSERS and block.kind != "not run":
            try:
                PARSERS[block.language](block.text)
            except Exception as error:
                raise AssertionError(f"{block.name}: {error}") from error


def test_python_that_is_not_run_compiles() -> None:
    for block in everything():
        if block.language == "python" and block.kind != "":
            try:
                compile(block.text, block.name, "exec", 0x2000)  # await at the top level
            except SyntaxError as error:
                raise AssertionError(f"{block.name}: {error}") from error


def test_commands_that_are_not_run_exist() -> None:
    reference = tool("reference")
    tree = dict(reference.command_tree())
    routes = [
        re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(route.path)) + "$")
        for route in reference.all_routes()
    ]
    for block in everything():
        if block.language == "bash":
            for line in commands(block):
                check_penstock(block, line, tree)
                check_curl(block, line, routes)


def commands(block: Block) -> Iterator[str]:
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        for part in re.split(r"\|\||&&|\||;|\$\(", re.sub(r"'[^']*'|\"[^\"]*\"", quoted, line)):
            yield part.replace("\0", "|").replace("\1", ";").replace("\2", "&&").strip(' )"')


def quoted(match: "re.Match[str]") -> str:
    text = match[0]
    if text.startswith('"') and "$(" in text:
        return text
    return text.replace("|", "\0").replace(";", "\1").replace("&&", "\2")


def check_penstock(block: Block, line: str, tree: dict[str, Any]) -> None:
    if not re.match(r"(\S*/)?penstock\b", line):
        return
    words = shlex.split(line, comments=True)[1:]
    name = "penstock"
    while words and words[0] in GLOBAL:
        del words[:2]
    while words and f"{name} {words[0]}" in tree:
        name += f" {words.pop(0)}"
    assert name != "penstock" or not words or words[0].startswith("-"), f"{block.name}: {line}"
    known = {"--help", "-h", "--version", "--install-completion", *GLOBAL}
    known |= {one for option in tool("reference").options(tree[name]) for one in option.names}
    for word in words:
        if word == "--":
            break
        if re.match(r"--[a-z]", word):
            assert word.partition("=")[0] in known, f"{block.name}: {name} has no {word}"
    if tree[name].default_command is None and words and not re.match(r"-|.*\.yaml$", words[0]):
        raise AssertionError(f"{block.name}: {name} has no command {words[0]}")


def check_curl(block: Block, line: str, routes: list["re.Pattern[str]"]) -> None:
    if not line.startswith("curl"):
        return
    for word in shlex.split(line, comments=True):
        match = re.match(r"https?://[^/]+:(?:6632|8443)(/[^?#]*)", word)
        if match and match[1] not in ("/openapi.json", "/docs"):
            assert any(route.match(match[1]) for route in routes), f"{block.name}: no {match[1]}"


# What is run


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("programs")
    with CommandServer(directory):
        yield directory


@pytest.fixture(scope="module")
def broker(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("docs")
    url = fresh_database(postgres)
    with BrokerProcess(directory, database_url=url) as process:
        process.database_url = url  # type: ignore[attr-defined]
        yield process


@pytest.fixture
def empty_broker(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """Pages use the same names; each begins with nothing there."""
    yield broker
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        for route in client.get("/api/v1/routes").json().get("routes", []):
            client.delete(f"/api/v1/routes/{route['name']}").raise_for_status()
        for one in client.get("/api/v1/schedules").json().get("schedules", []):
            client.delete(f"/api/v1/schedules/{one['name']}").raise_for_status()
        for queue in client.get("/api/v1/resources/queues").json()["queues"]:
            client.delete(f"/api/v1/resources/queues/{queue['name']}").raise_for_status()
        for topic in client.get("/topics").json():
            client.delete(f"/topics/{topic}").raise_for_status()


def test_every_operation_of_a_broker_is_in_the_reference(broker: BrokerProcess) -> None:
    pages = [ROOT / f"docs/reference/{name}.md" for name in ("http", "queen")]
    text = "\n".join(page.read_text() for page in pages)
    served = httpx.get(f"{broker.url}/openapi.json").json()["paths"]
    operations = {
        f"{verb.upper()} {path}"
        for path, verbs in served.items()
        for verb, operation in verbs.items()
        if operation.get("tags") != ["internal"]  # what only the Console and pipelines use
    }
    assert len(operations) > 80
    described = set()
    for verb, path, about in re.findall(r"^### (\S+) (/\S*)\n\n(.*)$", text, re.M):
        further = re.findall(r"`(/[^`]*)`", about.partition(" Also at ")[2])
        described |= {f"{verb} {one}" for one in (path, *further)}
    assert operations - described == set()


@pytest.mark.parametrize(
    "page",
    [page for page in RUN_PAGES if page != TUTORIAL],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_does_what_it_says(
    page: Path, empty_broker: BrokerProcess, programs: Path, scratch: Path
) -> None:
    broker = empty_broker
    host, port = broker.tcp
    environment = clean_environment(
        programs,
        PENSTOCK_URL=broker.url,
        PENSTOCK_BROKER=f"{host}:{port}",
        DATABASE_URL=broker.database_url,  # type: ignore[attr-defined]
    )
    names = ("http", "tcp", "kafka", "websocket")  # a broker that the page itself starts
    ports = {name: str(free_port()) for name in names}
    environment |= {f"PENSTOCK_{one.upper()}_SERVER_PORT": port for one, port in ports.items()}
    addresses = {
        "localhost:6632": f"localhost:{ports['http']}",
        "localhost:12345": f"localhost:{ports['tcp']}",
        "127.0.0.1:6632": broker.url.rpartition("//")[2],
        "127.0.0.1:12345": f"{host}:{port}",
        "127.0.0.1:9092": broker.kafka,
        "127.0.0.1:9090": broker.websocket.rpartition("//")[2].partition("/")[0],
        "127.0.0.1:4318": f"127.0.0.1:{free_port()}",  # a backend for OpenTelemetry
    }
    runner = PageRunner(scratch, environment, addresses)
    if page.parent.name == "how-to":
        runner.python("from penstock import SyncClient\nclient = SyncClient()")
        runner.python(BEFORE.get(page.name, ""))
    assert runner.run(page) > 0
    if page.parent.name == "how-to":
        runner.python("client.close()")


def run_tutorial(page: Path, directory: Path, programs: Path, **variables: str) -> int:
    """It starts a broker of its own, and stops PostgreSQL under it."""
    http, tcp, kafka, websocket = (free_port() for _ in range(4))
    environment = clean_environment(
        programs,
        PENSTOCK_HTTP_SERVER_PORT=str(http),
        PENSTOCK_TCP_SERVER_PORT=str(tcp),
        PENSTOCK_KAFKA_SERVER_PORT=str(kafka),
        PENSTOCK_WEBSOCKET_SERVER_PORT=str(websocket),
        PENSTOCK_URL=f"http://127.0.0.1:{http}",
        PENSTOCK_BROKER=f"127.0.0.1:{tcp}",
    )
    ports = {6632: http, 12345: tcp, 9092: kafka, 9090: websocket}
    addresses = {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in ports.items()}
    return PageRunner(directory, environment | variables, addresses, BLOCK_SECONDS).run(page)


@pytest.mark.timeout(300)
def test_the_tutorial_does_what_it_says(programs: Path, scratch: Path) -> None:
    assert run_tutorial(TUTORIAL, scratch, programs) > 10


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["wheel", "clone"])
def test_a_stranger_can_follow_the_whole_tutorial(form: str, soak: bool, scratch: Path) -> None:
    """From nothing: with the built wheel in a fresh environment, or with `make run` in a clone."""
    if not soak:
        pytest.skip("needs minutes: make soak")
    text = re.sub(r"<!-- not run: the suite uses .*-->\n", "", TUTORIAL.read_text())
    text = text.replace(f"{RUN_BY_SPARK}```yaml", "<!-- file: big.yaml -->\n```yaml")
    text = text.replace(RUN_BY_SPARK, "")
    if form == "wheel":
        directory, programs = scratch, scratch / "shop/bin"
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch, ROOT]
        subprocess.run(build, check=True)
    else:
        directory, programs = scratch / "penstock", scratch / "penstock/.venv/bin"
        subprocess.run(["git", "clone", "-q", ROOT, directory], check=True)
        text = re.sub(r"```bash\npython3 -m venv.*?```\n", "", text, flags=re.S)
        text = text.replace("\npenstock serve\n", "\nmake run\n")
        text = text.replace("\npip install 'penstock[", "\npython -m pip install -e '.[")
    page = scratch / "tutorial.md"
    page.write_text(text)
    path = f"{programs}:{os.environ['PATH']}"
    assert run_tutorial(page, directory, programs, PATH=path, PIP_FIND_LINKS=str(scratch)) > 12


# The machinery itself


def test_what_is_printed_is_compared_line_by_line() -> None:
    assert prints("a\nb\n", "a\nb")
    assert prints('{"id":"...","n":1}\n', '{"id":"0-1","n":1}\n')
    assert prints("first\n...\nlast\n", "first\nx\ny\nlast\n")
    assert not prints("a\nb\n", "a\nc\n")
    assert not prints("a\n", "a\nb\n")


def test_blocks_have_their_marks_and_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\necho 1\n```\n\n```text\n1\n```\n\n<!-- not run: why -->\n```bash\nrm\n```\n"
        "\n- a\n\n    <!-- file: x.py -->\n    ```python\n    a = 1\n    ```\n"
    )
    first, output, second, third = blocks(page)
    assert (first.is_run, first.output) == (True, "1\n")
    assert output.language == "text"
    assert (second.is_run, second.kind, second.about) == (False, "not run", "why")
    assert (third.kind, third.about, third.text) == ("file", "x.py", "a = 1\n")


def test_a_page_that_prints_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\necho 1\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="prints"):
        PageRunner(tmp_path, clean_environment(tmp_path), {}).run(page)
