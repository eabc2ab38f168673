"""The send queue of a route. What is outside of this package uses the names below, and no other.

           push                                          take, ack, give_back
            |                                                      |
    queue.SendQueue      limits, what happens at them, and waiting: the one door
            |                                                      |
    fastqueue.FastQueue  blocks leased and completed; the order in which they are taken
            |                                                      |
    writer.Writer ---------> memory.MemoryLayer -----------------> |   the newest blocks
            |                       | evict, spill                 |
            |                backlog.Backlog --------------------> |   what waits on disk only
            v                       | read ahead
    store.Store          what survives, and the order in which it reaches the disk
            |
            +-- chunks.Chunks    the stream of blocks in files; `blocks` has their format
            +-- journal.Journal  what became of each block; `Books` are its sum
            +-- fastqueue.meta   hints that spare a start the reading

By sequence number: blocks of the backlog < blocks in memory. A block that is leased, or was given
back and waits for its next attempt, is in neither; FastQueue has it.
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
