"""The memory layer of a send queue: the newest blocks, which are taken without a read."""

from collections import deque

from penstock.export.sendqueue.blocks import Block, bytes_of


class MemoryLayer:
    """A cache of blocks on disk, and the blocks that are in memory only (`unwritten`). Leased
    blocks stay in `unwritten`, because a spill writes them too.
    """

    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.limit = max_blocks  # adaptive sizing lowers it
        self._max_bytes = max_bytes
        self._blocks: deque[Block] = deque()  # oldest first
        self.bytes = 0
        self.unwritten: dict[int, Block] = {}  # open blocks that are only here, oldest first
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
        """Add numbered blocks, younger than all others here."""
        size = bytes_of(blocks)
        self._blocks.extend(blocks)
        self.bytes += size
        if not written:
            self.unwritten.update(
                zip(range(blocks[0].sequence, blocks[-1].sequence + 1), blocks, strict=True)
            )
            self.unwritten_bytes += size

    def take(self, *, newest: bool) -> Block:
        """Remove the newest or oldest block. Its body must not change from now on: the key that a
        destination gets contains the checksum of the body, before and after a restart.
        """
        block = self._blocks.pop() if newest else self._blocks.popleft()
        self.bytes -= block.size
        block.raw_length = block.raw_length or len(block.body)  # a spill does not compress it
        return block

    def replace_bodies(self, blocks: list[Block], copies: list[Block]) -> None:
        """Use the compressed bodies of the copies. A block that was taken meanwhile keeps its body,
        and its copy gets that too.
        """
        saved = 0
        for block, copy in zip(blocks, copies, strict=True):
            if block.raw_length:
                copy.body, copy.compression = block.body, block.compression
            else:
                saved += len(block.body) - len(copy.body)
                block.body, block.compression = copy.body, copy.compression
                block.raw_length = copy.raw_length
        self.bytes -= saved
        self.unwritten_bytes -= saved

    def completed(self, block: Block) -> None:
        if self.unwritten.pop(block.sequence, None) is not None:
            self.unwritten_bytes -= block.size

    def evict(self) -> list[Block]:
        """Remove the oldest blocks, which are on disk, until there is room. Return them."""
        evicted = []
        while self._blocks and self.full:
            evicted.append(self.take(newest=False))
        return evicted

    def written(self, blocks: list[Block], copies: list[Block]) -> list[Block]:
        """Record that `blocks` are on disk as `copies`. Remove blocks without a lease from memory,
        and return them.
        """
        for block, stored in zip(blocks, copies, strict=True):
            block.offset = stored.offset
            self.completed(block)
        evicted = []
        while self._blocks and self._blocks[0].offset >= 0:  # the oldest are written first
            evicted.append(self._blocks.popleft())
        self.bytes -= bytes_of(evicted)
        return evicted
