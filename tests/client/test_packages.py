"""`pip install penstock` is the client: what it brings, and what works with nothing else."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import trove_classifiers
from packaging.requirements import Requirement

pytestmark = pytest.mark.xdist_group("tests/client")  # with those that share the broker

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


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with our wheel, as it is published, and what it asks for without an extra."""
    place = tmp_path_factory.mktemp("fresh")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    venv.create(place / "venv", with_pip=False)
    (packages,) = place.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    (information,) = packages.glob("penstock-*.dist-info")
    needed = importlib.metadata.Distribution.at(information).requires or []
    for distribution in closure(needed).values():
        for path in distribution.files or []:
            if ".." not in path.parts and "__pycache__" not in path.parts:
                (packages / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(path.locate()), packages / path)
    return place / "venv"


def test_the_client_is_small_and_brings_no_server(fresh: Path) -> None:
    (packages,) = fresh.glob("lib/python*/site-packages")
    brought = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    assert brought == {"penstock", "httptools", "msgspec"}
    files = [path for path in packages.rglob("*") if "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files if path.is_file()) < MOST_BYTES


def test_queues_and_topics_work_with_the_base_alone(fresh, broker, queue):
    run = python(fresh, "import sys\n" + textwrap.dedent(USE), broker.url, queue)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "{'id': 7} {'tenant': 'a'}",
        "0",
        "Record(offset=2, payload=b'three')",
        "b'one'",
        "[b'one', b'two'] [0, 1, 2]",
        "3",
    ]


def python(fresh: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [fresh / "bin" / "python", "-I", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("command", "extra"), [("serve", "server"), ("pipeline", "pipeline"), ("queue", "cli")]
)
def test_a_command_whose_libraries_are_missing_says_what_to_install(fresh, command, extra):
    run = python(fresh, textwrap.dedent(COMMAND), command)
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
    assert "module 'nothing_here' was not found" in run.stderr


def test_the_extras_and_what_the_index_shows():
    assert PROJECT["optional-dependencies"].keys() >= {"server", "pipeline", "connect", "otel"}
    assert PROJECT["urls"].keys() >= {"Homepage", "Documentation", "Source", "Changelog"}
    assert PROJECT["keywords"]
    assert PROJECT["authors"]
    heavy = ("numpy", "pyarrow", "uvloop", "pgserver", "asyncpg", "pyspark")
    assert not [line for line in PROJECT["dependencies"] if any(word in line for word in heavy)]


def test_links_of_the_readme_lead_to_files_here_and_to_the_repository_on_an_index(fresh):
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\[[^]]*\]\((?!https?:)([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    (information,) = fresh.glob("lib/python*/site-packages/penstock-*.dist-info")
    about = importlib.metadata.Distribution.at(information).metadata
    shown = re.findall(r"\]\(([^)]+)\)", about["Description"] or about.get_payload())
    home = PROJECT["urls"]["Source"]
    assert [link for link in shown if not link.startswith(f"{home}/")] == []
    assert len(shown) > 10


def test_classifiers_are_the_pythons_that_the_suite_is_run_on() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    (line,) = re.findall(r"python: (\[.*\])", (ROOT / ".github/workflows/ci.yml").read_text())
    assert named == json.loads(line)
    assert f">={named[0]}" == PROJECT["requires-python"]
    assert set(PROJECT["classifiers"]) <= trove_classifiers.classifiers


def test_the_address_of_the_project_stands_where_contributing_says() -> None:
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    listed = subprocess.run(
        ["git", "grep", "-l", "--fixed-strings", home], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 128:
        pytest.skip("needs a git repository")
    assert listed.stdout.split() == ["CONTRIBUTING.md", "pyproject.toml"]
