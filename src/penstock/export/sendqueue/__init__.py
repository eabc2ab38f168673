"""The send queue of a route. What is outside of this package uses the names below, and no other.

queue      limits, what happens at them, and waiting: `SendQueue`, the one door
fastqueue  blocks leased from two layers and completed
layers     blocks in memory, the backlog on disk, and the one job that writes
store      what survives, and the order in which it reaches the disk
chunks     the stream of blocks in files
journal    what became of each block: entries, books, file
blocks     the format of a block, and reading chunk files
"""

from penstock.export.sendqueue.blocks import STREAM_END, Block, ChunkReader, chunk_files, records_of
from penstock.export.sendqueue.fastqueue import repair
from penstock.export.sendqueue.journal import DAMAGED, JOURNAL, NEWEST, SOURCE_GAP, Books, Journal
from penstock.export.sendqueue.queue import Pushed, SendQueue
from penstock.export.sendqueue.store import META

__all__ = [
    "DAMAGED",
    "JOURNAL",
    "META",
    "NEWEST",
    "SOURCE_GAP",
    "STREAM_END",
    "Block",
    "Books",
    "ChunkReader",
    "Journal",
    "Pushed",
    "SendQueue",
    "chunk_files",
    "records_of",
    "repair",
]
