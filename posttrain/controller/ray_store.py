"""Rows in Ray's object store: a rank puts what it made there, and whoever needs it reads it from there.

Ray holds an object once per machine, for all its ranks, and frees it when the last reference is gone.
"""

from __future__ import annotations

import sys
from typing import Any

from posttrain.batch.rows import Block, Held, Holder

INLINE_BYTES = 4096
"""Smaller blocks travel with what refers to them: an object costs a rank about a millisecond."""


class RayHolder(Holder):
    """A block in the store. `refs` is the list of a message's references, filled when it has arrived."""

    def __init__(self, refs: list[Any], number: int) -> None:
        self._refs, self._number = refs, number
        self._block: Block | None = None

    @property
    def ref(self) -> Any:
        return self._refs[self._number]

    def get(self) -> Block:
        if self._block is not None:
            return self._block
        import ray

        block: Block = ray.get(self.ref)
        self._block = block
        return block


def put_block(block: Block, owner: Any = None) -> Holder:
    """The block in the store, unless it is small. It is there as long as the actor `owner`, or this process, lives."""
    if sum(array.nbytes for pair in block.values() for array in pair) < INLINE_BYTES:
        return Held(block)
    import ray

    return RayHolder([ray.put(block, _owner=owner)], 0)


def in_ray() -> bool:
    """Whether this process belongs to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
