"""Convert a column of UUIDs to text, with a table of all groups of four hexadecimal digits."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pipeline.source_columns import joined_values

_FOURS = np.array([f"{i:04x}".encode() for i in range(1 << 16)], "S4").view("<u4")
_PLACES = (0, 4, 9, 14, 19, 24, 28, 32)  # of each group of four digits in the text
_TEXT = np.dtype(
    {
        "names": [*(f"w{i}" for i in range(8)), *(f"dash{i}" for i in range(4))],
        "formats": ["<u4"] * 8 + ["u1"] * 4,
        "offsets": [*_PLACES, 8, 13, 18, 23],
        "itemsize": 36,
    }
)
Words = npt.NDArray[np.int64] | npt.NDArray[np.uint16] | int


def message_ids(installation: int, partitions: pa.Array, seqs: pa.Array) -> pa.Array:
    """Return the ids of messages as text, in the layout of `message_uuid.sql`."""
    partition = partitions.to_numpy(zero_copy_only=False)
    seq = seqs.to_numpy(zero_copy_only=False)
    words: list[Words] = [
        installation >> 16,
        installation & 0xFFFF,
        partition >> 24,
        0x8000 | (partition >> 12) & 0xFFF,
        0x8000 | (partition & 0xFFF) << 2 | seq >> 48,
        (seq >> 32) & 0xFFFF,
        (seq >> 16) & 0xFFFF,
        seq & 0xFFFF,
    ]
    return _texts(words, len(partition))


def uuid_texts(raw: pa.Array) -> pa.Array:
    """Return 16-byte UUIDs as text; null stays null."""
    if raw.null_count == len(raw):
        return pa.nulls(len(raw), pa.string())
    valid = raw.is_valid()
    storage = getattr(raw, "storage", raw).cast(pa.binary())
    words = np.frombuffer(joined_values(storage), ">u2").astype(np.uint16).reshape(-1, 8)
    texts = _texts([words[:, i] for i in range(8)], len(words))
    if not raw.null_count:
        return texts
    at = np.cumsum(valid.to_numpy(zero_copy_only=False)) - 1
    return texts.take(pa.array(at, mask=~valid.to_numpy(zero_copy_only=False)))


def _texts(words: list[Words], count: int) -> pa.Array:
    text = np.empty(count, _TEXT)
    for i, word in enumerate(words):
        text[f"w{i}"] = _FOURS[word]
    for i in range(4):
        text[f"dash{i}"] = ord("-")
    ends = np.arange(0, 36 * (count + 1), 36, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(text)])
