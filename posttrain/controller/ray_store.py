"""Rows in Ray's object store: a rank puts what it made there, and whoever needs it reads it from there.

Ray holds an object once per machine, for all its ranks, and frees it when the last reference is gone. An object is lost
with its owner, the process that has put it there; but the results of a call belong to the caller. A rollout worker that
may be replaced therefore gives the blocks that it makes in a call as a second result of it (`put_beside`).
"""

from __future__ import annotations

import sys
from typing import Any

from posttrain.batch.rows import Block, Held, Holder
from posttrain.controller.incidents import CONTINUES, PeerLost
from posttrain.errors import first_line

INLINE_BYTES = 4096
"""Smaller blocks travel with what refers to them: an object costs a rank about a millisecond."""


class RayHolder(Holder):
    """A block in the store. `refs` is the list of a message's references, filled when it has arrived. Where an object
    is a list of blocks, `part` is the number of this one."""

    def __init__(self, refs: list[Any], number: int, part: int | None = None) -> None:
        self._refs, self._number, self.part = refs, number, part
        self._block: Block | None = None

    @property
    def ref(self) -> Any:
        return self._refs[self._number]

    def get(self) -> Block:
        if self._block is not None:
            return self._block
        import ray
        from ray.exceptions import ObjectLostError

        try:
            found: Any = ray.get(self.ref)
        except ObjectLostError as error:
            raise PeerLost(
                f"Rows of a batch are lost with the worker, or the machine, that had made them: {first_line(error)} "
                f"{CONTINUES}"
            ) from error
        block: Block = found if self.part is None else found[self.part]
        self._block = block
        return block


class HolderBeside(Holder):
    """A block that travels beside the answer to a call, as the block `part` of its second result."""

    def __init__(self, block: Block, part: int) -> None:
        self._block, self.part = block, part

    def get(self) -> Block:
        return self._block


def put_block(block: Block) -> Holder:
    """The block in the store, unless it is small. It is there as long as this process lives."""
    if _is_small(block):
        return Held(block)
    import ray

    return RayHolder([ray.put(block)], 0)


def put_beside(blocks: list[Block], block: Block) -> Holder:
    """The block among those that are the second result of this call, unless it is small."""
    if _is_small(block):
        return Held(block)
    blocks.append(block)
    return HolderBeside(block, len(blocks) - 1)


def _is_small(block: Block) -> bool:
    return sum(array.nbytes for pair in block.values() for array in pair) < INLINE_BYTES


def in_ray() -> bool:
    """Whether this process belongs to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
