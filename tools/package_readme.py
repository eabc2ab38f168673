"""Hatchling's hook for the text that a package index shows: the README with absolute links.

In a clone and on a code host the links of README.md are relative. An index has only this text,
so they get the project's address before them.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(?<=\]\()(?!\w+:|#)(?=\S+\))")


class PackageReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = metadata["urls"]["Source"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": RELATIVE.sub(f"{address}/", text),
        }
