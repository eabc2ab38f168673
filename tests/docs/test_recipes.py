"""The recipes of docs/how-to, run as a reader would: every Python block and every command of a
page, in order, against one broker.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
RECIPES = {  # page: what a reader would have before it
    "retries-and-dead-letters": "",
    "ordering-and-parallelism": "",
    "delays-and-schedules": "",
    "transactions": "",
    "fan-out-and-replay": "",
    "stuck-group": "client.push('orders', 1)",
    "moving": "from pathlib import Path; Path('copy-of-the-data').mkdir()",
}
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.xdist_group("examples")


@pytest.fixture(scope="module")
def broker(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("recipes")
    with BrokerProcess(directory, database_url=fresh_database(postgres)) as process:
        yield process


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_works_as_it_is_written(page: str, broker: BrokerProcess, tmp_path: Path) -> None:
    blocks = BLOCK.findall((HOW_TO / f"{page}.md").read_text())
    assert blocks
    script = ["from penstock import SyncClient", "client = SyncClient()", RECIPES[page]]
    script.append("import subprocess")
    for language, text in blocks:
        if language == "python":
            script.append(text)
            continue
        for command in filter(None, text.splitlines()):
            words = shlex.split(command)
            assert words[0] == "penstock"
            words = [sys.executable, "-m", "penstock", *words[1:]]
            script.append(f"subprocess.run({words!r}, check=True)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        env={**os.environ, "PENSTOCK_URL": broker.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
