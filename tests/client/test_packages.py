"""`pip install penstock` is the client: what it brings, and what works with nothing else."""

import importlib.metadata
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock

pytestmark = pytest.mark.xdist_group("queue-client")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 15_000_000

# Only what the base dependencies bring can be imported, as in an environment with nothing else.
ALONE = """
    import sys

    allowed = set(sys.argv.pop(1).split(","))

    class OnlyTheBase:
        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            if top not in allowed | sys.stdlib_module_names and not top.startswith("_"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, OnlyTheBase())
"""
USE = """
    import asyncio
    from penstock import Client, SyncClient

    url, queue = sys.argv[1:]

    async def main():
        async with Client(url) as client:
            await client.push(queue, {"id": 7}, headers={"tenant": "a"})
            async for message in client.take(f"{queue}@g", idle=0):
                await message.ack()
                print(message.data, message.headers)
            topic = client.topic(queue)
            print(await topic.produce(b"one", b"two"))
            async with topic.producer() as producer:
                await producer.send(b"three")
            print([record async for record in topic.read()][-1])
            async for record in topic.tail("earliest"):
                print(record.payload)
                break
            async for batch in topic.group("g").take(follow=False):
                print(batch.until(2).payloads(), batch.offsets().tolist())

    asyncio.run(main())
    with SyncClient(url) as client:
        print(client.topic(queue).next_offset())
"""
ORDERS = """
name: orders
source: {topic: orders, format: json, schema: "id BIGINT"}
steps: [{name: same, sql: "SELECT * FROM orders"}]
sink: {topic: copied}
"""
COMMAND = """
    from penstock.__main__ import main
    main()
"""


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that these need, with those they need."""
    collected: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        needed = Requirement(waiting.pop())
        name = needed.name
        if name in collected or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        collected[name] = importlib.metadata.distribution(name)
        waiting += collected[name].requires or []
    return collected


def alone(
    code: str, *arguments: str, extras: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run code that can import only what the base, or it with some extras, brings."""
    needed = list(PROJECT["dependencies"])
    for extra in extras:
        needed += PROJECT["optional-dependencies"][extra]
    tops = {"penstock"}
    for distribution in closure(needed).values():
        for file in distribution.files or []:
            tops.add(file.parts[0].removesuffix(".py").partition(".")[0])
    program = textwrap.dedent(ALONE) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, ",".join(tops), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_client_with_its_dependencies_is_small():
    sizes = {
        name: sum(
            Path(str(file.locate())).stat().st_size
            for file in distribution.files or []
            if Path(str(file.locate())).exists() and "__pycache__" not in file.parts
        )
        for name, distribution in closure(PROJECT["dependencies"]).items()
    }
    root = Path(penstock.__file__).parent
    ours = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    sizes["penstock"] = sum(path.stat().st_size for path in ours)
    assert {"msgspec", "httptools"} < sizes.keys()
    assert sum(sizes.values()) < MOST_BYTES, sizes


def test_queues_and_topics_work_with_the_base_alone(broker, queue):
    run = alone(USE, broker.url, queue)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "{'id': 7} {'tenant': 'a'}",
        "0",
        "Record(offset=2, payload=b'three')",
        "b'one'",
        "[b'one', b'two'] [0, 1, 2]",
        "3",
    ]


@pytest.mark.parametrize(
    ("command", "extra"), [("serve", "server"), ("pipeline", "pipeline"), ("queue", "cli")]
)
def test_a_command_whose_libraries_are_missing_says_what_to_install(command, extra):
    run = alone(COMMAND, command)
    assert run.returncode == 2
    assert run.stderr.endswith(
        f"For `penstock {command}` first: pip install 'penstock[{extra}]'\n"
    ), run.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("serve", "server"),
        ("backup /nowhere", "server"),
        ("restore /nowhere", "server"),
        ("pipeline run orders.yaml", "pipeline"),
        ("pipeline run archive /nowhere --topic t", "pipeline"),
    ],
)
def test_with_the_commands_alone_the_others_say_what_to_install(words, extra):
    run = alone(COMMAND, *words.split(), extras=("cli",))
    assert run.returncode == 2, run.stderr
    command = words.split()[0]
    assert re.fullmatch(
        rf"penstock: `penstock {command}` needs \w+, so first: pip install 'penstock\[{extra}\]'\n",
        run.stderr,
    ), run.stderr


def test_where_the_server_is_but_not_spark_a_pipeline_says_what_to_install(tmp_path):
    file = tmp_path / "orders.yaml"
    file.write_text(ORDERS)
    run = alone(COMMAND, "pipeline", "run", str(file), extras=("cli", "server"))
    assert run.returncode in (1, 2), run.stderr
    assert run.stderr.endswith("pip install 'penstock[pipeline]'\n"), run.stderr


def test_the_worker_runs_with_the_base_alone():
    run = alone(COMMAND, "worker", "nothing_here:client")
    assert run.returncode == 2
    assert "there is no module 'nothing_here'" in run.stderr


def test_the_extras_and_what_the_index_shows():
    assert PROJECT["optional-dependencies"].keys() >= {"server", "pipeline", "connect", "otel"}
    assert PROJECT["urls"].keys() >= {"Homepage", "Documentation", "Source", "Changelog"}
    assert PROJECT["keywords"]
    assert PROJECT["authors"]
    heavy = ("numpy", "pyarrow", "uvloop", "pgserver", "asyncpg", "pyspark")
    assert not [line for line in PROJECT["dependencies"] if any(word in line for word in heavy)]


def test_links_of_the_readme_lead_to_files_here_and_to_the_repository_on_an_index():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\[[^]]*\]\((?!https?:)([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    about = importlib.metadata.metadata("penstock")
    shown = re.findall(r"\]\(([^)]+)\)", about["Description"] or about.get_payload())
    home = PROJECT["urls"]["Source"]
    assert [link for link in shown if not link.startswith(f"{home}/")] == []
    assert len(shown) > 10


def test_a_fresh_environment_has_the_client_only(soak, broker, queue, tmp_path):
    if not soak:
        pytest.skip("the long form: make soak")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", ROOT], check=True)
    program = "import sys\n" + textwrap.dedent(USE)
    subprocess.run([python, "-c", program, broker.url, queue], check=True, timeout=100)
    run = subprocess.run(
        [tmp_path / "venv" / "bin" / "penstock", "serve"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install 'penstock[server]'" in run.stderr
