"""The segment formats by their names in settings and manifests."""

from penstock.log.aiq.format import AIQ
from penstock.log.batches.format import BATCHES
from penstock.log.format import SegmentFormat

FORMATS: dict[str, SegmentFormat] = {AIQ.name: AIQ, BATCHES.name: BATCHES}
