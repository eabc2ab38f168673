"""The send queue of a route. Other packages use only the names in `__all__`.

           push                                          take, ack, give_back
            |                                                      |
    queue.SendQueue      the limits and their policies; waiting
            |                                                      |
    fastqueue.FastQueue  leases and completions of blocks; the order in which they are taken
            |                                                      |
    writer.ChunkWriter ----> memory.MemoryLayer -----------------> |   the newest blocks
            |                       | evict, spill                 |
            |                backlog.Backlog --------------------> |   blocks that are on disk only
            v                       | read ahead
    store.Store          all that is on disk, and the order of writes
            |
            +-- chunks.Chunks    the stream of blocks in files; `blocks` has their format
            +-- journal.Journal  the outcome of each block; `Books` are the sum
            +-- fastqueue.meta   hints, so that a start need not read the chunks

Blocks of the backlog have lower sequence numbers than blocks in memory. A block that is leased, or
that waits for its next attempt, is in neither of them but in FastQueue.
"""

from penstock.export.sendqueue.blocks import STREAM_END, Block, ChunkReader, chunk_files, records_of
from penstock.export.sendqueue.fastqueue import repair
from penstock.export.sendqueue.journal import DAMAGED, JOURNAL, NEWEST, SOURCE_GAP, Books, Journal
from penstock.export.sendqueue.queue import PushedBlocks, SendQueue
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
    "PushedBlocks",
    "SendQueue",
    "chunk_files",
    "records_of",
    "repair",
]
