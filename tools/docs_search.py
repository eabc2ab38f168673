"""Rank the pages of the docs site in its search: guides first, decisions last (a mkdocs hook).

The search counts a word in a title a thousand times, so a page that should stay behind needs a
weight below a thousandth.
"""

from typing import Any

WEIGHTS = {
    "start/": 4.0,
    "how-to/": 4.0,
    "explanation/benchmarks.md": 0.0001,
    "decisions/": 0.0001,
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    for place, weight in WEIGHTS.items():
        if page.file.src_uri.startswith(place):
            page.meta["search"] = {"boost": weight}
    return markdown
