"""The send queue of a route. What is outside of this package uses the names below, and no other.

queue      limits, what happens at them, and waiting: `SendQueue`, the one door
limits     how large it may be, and how much memory there is
fastqueue  blocks in two layers, leased and completed; the one job that writes
layers     blocks in memory, and the backlog on disk
store      what survives, and the order in which it reaches the disk
chunks     the stream of blocks in files
journal    what became of each block: entries, books, file
blocks     the format of a block, and reading chunk files
inspect    looking into a queue's files from outside
"""

from penstock.export.sendqueue.blocks import Block, records_of
from penstock.export.sendqueue.journal import DAMAGED, NEWEST, REASONS, SOURCE_GAP
from penstock.export.sendqueue.queue import Pushed, SendQueue

__all__ = [
    "DAMAGED",
    "NEWEST",
    "REASONS",
    "SOURCE_GAP",
    "Block",
    "Pushed",
    "SendQueue",
    "records_of",
]
