"""The memory layer of a send queue: the newest blocks, ready to be taken without a read.

A block in it is on disk too (then memory is a cache, and forgetting it costs a read) or in memory
only ("unwritten"). Unwritten blocks stay listed here while somebody holds a lease on them, because
a spill writes those too.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from penstock.export.block import HEADER_SIZE, Block

_body, _records = attrgetter("body"), attrgetter("records")


def bytes_of(blocks: Sequence[Block]) -> int:
    """What the blocks take up, headers included."""
    return HEADER_SIZE * len(blocks) + sum(map(len, map(_body, blocks)))


def records_of(blocks: Sequence[Block]) -> int:
    return sum(map(_records, blocks))


class MemoryLayer:
    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.limit = max_blocks  # adaptive sizing lowers it
        self._max_bytes = max_bytes
        self._blocks: deque[Block] = deque()  # oldest first
        self.bytes = 0
        self.unwritten: dict[
            int, Block
        ] = {}  # unsettled blocks that are in memory only, oldest first
        self.unwritten_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def full(self) -> bool:
        return len(self._blocks) > self.limit or self.bytes > self._max_bytes

    @property
    def oldest(self) -> Block | None:
        return self._blocks[0] if self._blocks else None

    def add(self, blocks: list[Block], *, written: bool) -> None:
        """Numbered blocks, younger than all that are here."""
        size = bytes_of(blocks)
        self._blocks.extend(blocks)
        self.bytes += size
        if not written:
            self.unwritten.update(
                zip(range(blocks[0].sequence, blocks[-1].sequence + 1), blocks, strict=True)
            )
            self.unwritten_bytes += size

    def take(self, *, newest: bool) -> Block:
        block = self._blocks.pop() if newest else self._blocks.popleft()
        self.bytes -= block.size
        return block

    def settled(self, block: Block) -> None:
        if self.unwritten.pop(block.sequence, None) is not None:
            self.unwritten_bytes -= block.size

    def evict(self) -> Iterable[Block]:
        """Forget the oldest blocks, which are on disk, until there is room."""
        while self._blocks and self.full:
            yield self.take(newest=False)

    def written(self, blocks: list[Block], copies: list[Block]) -> list[Block]:
        """`blocks` are on disk, as `copies`; those of them that nobody took leave memory and are
        returned.
        """
        for block, stored in zip(blocks, copies, strict=True):
            block.offset = stored.offset
            self.settled(block)
        gone = []
        while self._blocks and self._blocks[0].offset >= 0:  # the oldest are written first
            gone.append(self._blocks.popleft())
        self.bytes -= bytes_of(gone)
        return gone
