"""Type checkers know the client: they find what is wrong with a program, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import playwright
import pyright

SAMPLE = Path(__file__).parent / "sample_program.py"


def test_mypy_and_pyright_find_every_typo_in_the_sample_program_and_nothing_else() -> None:
    # node comes with playwright, the checker itself with its package: nothing is downloaded
    node = Path(playwright.__file__).parent / "driver" / "node"
    checker = Path(pyright.__file__).parent / "dist" / "index.js"
    cache = Path(__file__).parents[2] / ".mypy_cache" / "sample_program"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}"]
    commands = {
        r"sample_program\.py:(\d+): error": [*mypy, "--follow-imports=silent"],
        r"sample_program\.py:(\d+):\d+ - error": [node, checker, "--pythonpath", sys.executable],
    }
    runs = {
        pattern: subprocess.Popen([*command, SAMPLE], stdout=subprocess.PIPE, text=True)
        for pattern, command in commands.items()
    }
    lines = SAMPLE.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    for pattern, run in runs.items():
        output = run.communicate()[0]
        assert {int(number) for number in re.findall(pattern, output)} == wrong, output
