"""The key/value cache: one pool of blocks per layer, handed out by number.

Memory is taken as it is needed, up to a limit, and a request is let in only when all it may ever need is free: a
running row never has to be thrown out. What is handed out depends on tokens alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from posttrain.errors import UserError
from posttrain.kernels.cuda import to_device
from posttrain.kernels.decode import BLOCK, LayerCache, copy_tokens, new_cache

KEPT = 2**30  # bytes of host memory that a sleeping pool keeps: faulting them in again each time costs more
KEPT_SHARE = 1 / 8  # of a CUDA device's memory: steps captured over a cache that goes away must be captured again


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def with_slack(blocks: int) -> int:
    """Blocks that are taken when so many are needed: a little more, so that the next wave does not grow it again."""
    return blocks + blocks // 8


def kept_bytes(device: torch.device) -> int:
    """What a sleeping pool may keep."""
    if device.type != "cuda":
        return KEPT
    return int(torch.cuda.get_device_properties(device).total_memory * KEPT_SHARE)


class Pool:
    """Blocks of all layers; layers are made when the model first asks for them."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, limit_bytes: int, bytes_per_token: int) -> None:
        self.dtype, self.device = dtype, device
        self.limit = max(1, limit_bytes // (bytes_per_token * BLOCK))
        self.clear()

    def clear(self) -> None:
        self.layers: dict[int, LayerCache] = {}
        self.size, self.free = 0, []

    def sleep(self) -> None:
        """Give memory back; where little of it is held, it is kept."""
        if self.held_bytes() > kept_bytes(self.device):
            self.clear()

    def held_bytes(self) -> int:
        return sum(tensor.nbytes for cache in self.layers.values() for tensor in cache)

    def empty_twin(self) -> Pool:
        """Another pool of the same kind and limit, which holds nothing yet."""
        twin = copy.copy(self)
        twin.clear()
        return twin

    @property
    def used(self) -> int:
        return self.size - len(self.free)

    def fits(self, blocks: int) -> bool:
        return self.used + blocks <= self.limit

    def check(self, prompt: int, response: int) -> None:
        """Refuse what could never be let in."""
        needed = blocks_for(prompt) + blocks_for(response)
        if needed > self.limit:
            raise UserError(
                f"a prompt of {prompt} tokens with up to {response} more needs {needed} blocks of {BLOCK} tokens in "
                f"the key/value cache, which holds {self.limit}: raise actor_rollout_ref.rollout.kv_cache_gb, or lower "
                "data.max_response_length"
            )

    def reserve(self, blocks: int) -> None:
        """Have memory for this many blocks more, as far as the limit allows."""
        needed = min(self.limit, self.used + blocks)
        if needed > self.size:
            self._grow(min(self.limit, with_slack(needed)))

    def take(self, blocks: int) -> list[int]:
        self.reserve(blocks)
        assert len(self.free) >= blocks, f"{blocks} blocks were wanted, and {len(self.free)} are free"
        taken = self.free[-blocks:][::-1] if blocks else []
        del self.free[len(self.free) - blocks :]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self.free.extend(reversed(blocks))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Keys and values from places to places of all layers; a place is block * BLOCK + offset."""
        source_T, target_T = (to_device(torch.tensor(places), self.device) for places in (source, target))
        for cache in self.layers.values():
            copy_tokens(cache, source_T, target_T)

    def _grow(self, size: int) -> None:
        for number, old in self.layers.items():
            heads, width = old[1].shape[1], old[1].shape[3]
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
