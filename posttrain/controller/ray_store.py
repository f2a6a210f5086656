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


def put_block(block: Block, keeper: Any = None) -> Holder:
    """The block in the store, unless it is small. It is lost with this process, or with `keeper`, a BlockKeeper."""
    if sum(array.nbytes for pair in block.values() for array in pair) < INLINE_BYTES:
        return Held(block)
    import ray

    return RayHolder([ray.put(block)] if keeper is None else ray.get(keeper.keep.remote(block)), 0)


class BlockKeeper:
    """Becomes a Ray actor that owns the blocks of the rollout workers of its machine. Ray frees what a process has
    stored when that process dies, whoever else has a reference; so that a lost worker's responses can still be read,
    they are stored by this process."""

    def __init__(self) -> None:
        self._pinned: dict[str, Any] = {}

    def keep(self, block: Block) -> list[Any]:
        """A reference to the block. It is pinned until it was handed over: Ray counts a reference that the driver got
        from the worker as the worker's, and forgets it when that dies."""
        import ray

        ref = ray.put(block)
        self._pinned[ref.hex()] = ref
        return [ref]

    def hand_over(self, refs: list[Any]) -> list[Any]:
        """The same references, which Ray then counts as the caller's."""
        for ref in refs:
            self._pinned.pop(ref.hex(), None)
        return refs


def in_ray() -> bool:
    """Whether this process belongs to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
