"""Encode records of aiq's layout as record batches, for Kafka's clients. Each append time has its
own batch, and becomes the time of its records.
"""

from itertools import pairwise

import numpy as np

from penstock.log.batches.encode import encode_values
from penstock.log.segment import Batch
from penstock.protocol.kafka_batch import LOG_APPEND_TIME, NewRecord, encode_head, encode_record


def encode_read(batch: Batch, times: np.ndarray) -> bytes:
    """Encode records as record batches. `times` are their append times in microseconds."""
    payloads, offsets = batch.payloads(), batch.offsets
    cuts = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(offsets)]
    parts: list[bytes] = []
    for low, high in pairwise(cuts):
        deltas = (offsets[low:high] - offsets[low]).tolist()
        if deltas[-1] == high - low - 1:
            records = bytes(encode_values(payloads[low:high]))
        else:  # compaction left gaps
            records = b"".join(
                encode_record(delta, NewRecord(payload), 0)
                for delta, payload in zip(deltas, payloads[low:high], strict=True)
            )
        time = int(times[low]) // 1000
        head = encode_head(
            [records],
            high - low,
            base_offset=int(offsets[low]),
            timestamps=(time, time),
            last_offset_delta=deltas[-1],
            attributes=LOG_APPEND_TIME,
        )
        parts += (head, records)
    return b"".join(parts)
