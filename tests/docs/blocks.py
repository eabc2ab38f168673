"""The fenced blocks of the docs, and what is to be done with each.

A comment above a block says what is special about it:

| comment                      | meaning                                                        |
|------------------------------|----------------------------------------------------------------|
| `<!-- not run: reason -->`   | nobody runs it, and why; its commands are still looked up      |
| `<!-- run by: tests/x.py -->`| another test does, which names the page                        |
| `<!-- file: name -->`        | the block is a file that later ones use                        |
| `<!-- background -->`        | it runs beside the ones that follow, until the page ends       |
| `<!-- appears there -->`     | output that the last one in the background prints by now       |

Without one, `bash` and `python` are run, and what they print is compared with a `text` block right
below, where `...` stands for anything. `json`, `yaml`, `toml` and `sql` must parse. `text` is for
reading. A block that says nothing of what it is fails.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.tools import ROOT

MARK = "<!-- made by tools/reference"  # below it the page is made from the code
FENCE = re.compile(
    r"(?:^[ \t]*<!-- (?P<mark>[^>]*?) -->\s*\n\s*)?"
    r"^(?P<indent>[ \t]*)(?P<ticks>```+)(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^[ \t]*(?P=ticks)[ \t]*$",
    re.M | re.S,
)


@dataclass(slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    kind: str  # the word of its comment: "not run", "run by", "file", "background", or ""
    about: str  # what the comment says beyond it
    adjacent: bool  # nothing stands between it and the block above
    output: str | None = None  # what running it prints

    @property
    def name(self) -> str:
        path = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{path}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and self.kind in ("", "background")


def pages() -> list[Path]:
    result = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
    return result + sorted((ROOT / "docs").rglob("*.md"))


def by_hand(page: Path) -> str:
    """What people wrote; what is made from the code is compared with it instead."""
    return page.read_text().partition(MARK)[0]


def blocks(page: Path) -> list[Block]:
    text = by_hand(page)
    collected: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        kind, _, about = (match["mark"] or "").partition(":")
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines(keepends=True)]
        block = Block(
            page,
            text.count("\n", 0, match.start("ticks")) + 1,
            match["language"],
            "".join(lines),
            kind.strip(),
            about.strip(),
            not text[end : match.start()].strip(),
        )
        end = match.end()
        above = collected[-1] if collected and block.adjacent else None
        if block.language == "text" and not block.kind and above and above.is_run:
            above.output = block.text
        collected.append(block)
    return collected


def everything() -> Iterator[Block]:
    for page in pages():
        yield from blocks(page)


def prints(expected: str, printed: str) -> bool:
    """Whether it prints what the page says: line by line, `...` is anything, also nothing."""
    pattern = "\n".join(
        ".*" if line.strip() == "..." else ".*".join(map(re.escape, line.rstrip().split("...")))
        for line in expected.rstrip().splitlines()
    )
    pattern = re.sub(r"(^|\n)\.\*(?=\n|$)", r"(?s:\1.*?)", pattern)
    lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, lines) is not None
