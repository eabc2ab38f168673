"""The formats there are, by the name that settings and manifests give them."""

from pathlib import Path

from penstock.log.aiq.format import AIQ
from penstock.log.batches.format import BATCHES
from penstock.log.format import SegmentFormat
from penstock.log.layout import has_batches


def format_of(directory: Path) -> SegmentFormat:
    """The format of the log in this directory."""
    return BATCHES if has_batches(directory) else AIQ


FORMATS: dict[str, SegmentFormat] = {AIQ.name: AIQ, BATCHES.name: BATCHES}
