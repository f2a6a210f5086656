"""The key/value cache: one pool of blocks per layer, handed out by number.

Memory is taken as it is needed, up to a limit, and a request is let in only when all it may ever need is free: a
running row never has to be thrown out. What is handed out depends on tokens alone.
"""

from __future__ import annotations

import torch

from posttrain.errors import UserError
from posttrain.kernels.decode import BLOCK, LayerCache, new_cache

FIRST = 256  # blocks in the smallest pool


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Pool:
    """Blocks of all layers; layers are made when the model first asks for them."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, limit_bytes: int, bytes_per_token: int) -> None:
        self.dtype, self.device = dtype, device
        self.limit = max(1, limit_bytes // (bytes_per_token * BLOCK))
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self.layers: dict[int, LayerCache] = {}
        self.size, self.free = 0, []

    @property
    def used(self) -> int:
        return self.size - len(self.free)

    def fits(self, blocks: int) -> bool:
        return self.used + blocks <= self.limit

    def check(self, prompt: int, response: int) -> None:
        """Refuse what could never be let in: a row's blocks, and besides them the prompt's half-filled one."""
        needed = blocks_for(prompt + response) + 1
        if needed > self.limit:
            raise UserError(
                f"a prompt of {prompt} tokens with up to {response} more needs {needed} blocks of {BLOCK} tokens in "
                f"the key/value cache, which holds {self.limit}: raise actor_rollout_ref.rollout.kv_cache_gb, or lower "
                "data.max_response_length"
            )

    def take(self, blocks: int) -> list[int]:
        if len(self.free) < blocks:
            self._grow(self.used + blocks)
        taken = self.free[-blocks:][::-1] if blocks else []
        del self.free[len(self.free) - blocks :]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self.free.extend(reversed(blocks))

    def _grow(self, needed: int) -> None:
        assert needed <= self.limit
        size = min(self.limit, max(FIRST, needed, 2 * self.size))
        for number, old in self.layers.items():
            heads, width = old[0].shape[1:3]
            new = new_cache(size, heads, width, self.dtype, self.device)
            for whole, part in zip(new, old, strict=True):
                whole[: self.size] = part
            self.layers[number] = new
        self.free = [*range(size - 1, self.size - 1, -1), *self.free]
        self.size = size

    def layer(self, number: int, heads: int, width: int) -> LayerCache:
        if number not in self.layers:
            self.layers[number] = new_cache(self.size, heads, width, self.dtype, self.device)
        return self.layers[number]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer."""
        if not pairs:
            return
        source, target = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        for cache in self.layers.values():
            for tensor in cache:
                tensor[target] = tensor[source]
