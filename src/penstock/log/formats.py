"""The formats of segments, by the name that settings and manifests give them."""

from penstock.log.aiq.format import AIQ
from penstock.log.batches.format import BATCHES
from penstock.log.format import SegmentFormat

FORMATS: dict[str, SegmentFormat] = {AIQ.name: AIQ, BATCHES.name: BATCHES}
