"""The KV cache: one pool of blocks per layer, handed out by number and shared by reference counts.

Prompts and running rows hold blocks; ended turns keep blocks for the turn that continues them. A block that is only
kept can be evicted, so admission counts it as free. Memory is taken as it is needed, up to a limit. What is handed out
depends on tokens alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch

from posttrain.errors import UserError
from posttrain.kernels.cuda import to_device
from posttrain.kernels.decode import BLOCK, LayerCache, copy_tokens, new_cache
from posttrain.models.routing import RouteShape
from posttrain.rollout.native.states import StatePool

KEPT = 2**30  # bytes of host memory that a sleeping pool keeps: faulting them in again each time costs more
UNLIMITED = 2**40  # blocks, where no layer has keys and values: they are numbers only
KEPT_SHARE = 1 / 8  # of a CUDA device's memory: steps captured over a cache that goes away must be captured again


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


# Tokens fill blocks in order, with one gap at most: the first `gap` tokens may be a prompt that several rows share, its
# last block half full, and what follows starts in a block of its own. Kernels of captured decoding know this layout.
def blocks_up_to(tokens: int, gap: int) -> int:
    """Blocks that hold the first `tokens` tokens."""
    return blocks_for(tokens) if tokens <= gap else blocks_for(gap) + blocks_for(tokens - gap)


def tokens_in(blocks: int, gap: int) -> int:
    """How many tokens the first `blocks` blocks can hold."""
    before = min(blocks, blocks_for(gap))
    return min(before * BLOCK, gap) + (blocks - before) * BLOCK


def block_starts(blocks: int, gap: int) -> list[int]:
    """The position at which each of so many blocks starts."""
    return [tokens_in(number, gap) for number in range(blocks)]


def with_slack(blocks: int) -> int:
    """Blocks that are taken when so many are needed: a little more, so that the next wave does not grow it again."""
    return blocks + blocks // 8


def kept_bytes(device: torch.device) -> int:
    """What a sleeping pool may keep."""
    if device.type != "cuda":
        return KEPT
    return int(torch.cuda.get_device_properties(device).total_memory * KEPT_SHARE)


class Pool:
    """Blocks of all layers; layers are made when the model first asks for them. `evict(n)` is called when fewer than
    `n` blocks are free, and lets go of blocks that are only kept.

    `states` are the slots of recurrent layers. With `routes` it holds the experts of every cached token beside its keys
    and values, so they are shared, kept and copied with a token's block.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        limit_bytes: int,
        bytes_per_token: int,
        routes: RouteShape | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.dtype, self.device, self.routes = dtype, device, routes
        self.limit = max(1, limit_bytes // (bytes_per_token * BLOCK)) if bytes_per_token else UNLIMITED
        self.states = states or StatePool(device)
        self.evict: Callable[[int], None] = _nothing_to_evict
        self.clear()

    def clear(self) -> None:
        self.layers: dict[int, LayerCache] = {}
        self.routes_PLK: torch.Tensor | None = None if self.routes is None else self._new_routes(0)
        self.size, self.free = 0, list[int]()
        self.held, self.kept = list[int](), list[int]()  # by block: prompts and rows that hold it, turns that keep it
        self.busy = 0  # blocks that are held
        self.states.clear()

    def sleep(self) -> None:
        """Give memory back; where little of it is held, it is kept."""
        if self.held_bytes() > kept_bytes(self.device):
            self.clear()

    def held_bytes(self) -> int:
        routes = 0 if self.routes_PLK is None else self.routes_PLK.nbytes
        blocks = sum(tensor.nbytes for cache in self.layers.values() for tensor in cache)
        return self.states.store.nbytes + routes + blocks

    def empty_twin(self) -> Pool:
        """Another pool of the same kind and limit, which holds nothing yet."""
        twin = copy.copy(self)
        twin.evict, own = _nothing_to_evict, self.states
        twin.states = StatePool(self.device, limit=own.limit, bytes_per_slot=own.bytes_per_slot)
        twin.clear()
        return twin

    @property
    def used(self) -> int:
        """Blocks that are held or kept."""
        return self.size - len(self.free)

    @property
    def available(self) -> int:
        """Blocks that can be taken without an eviction."""
        return self.limit - self.used

    def fits(self, blocks: int, states: int = 0) -> bool:
        return self.busy + blocks <= self.limit and self.states.fits(states)

    def check(self, prompt: int, response: int) -> None:
        """Reject a request that could never be admitted."""
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
        """Hold so many free blocks; kept ones are evicted where there are too few."""
        if blocks > self.available:
            self.evict(blocks)
        self.reserve(blocks)
        assert len(self.free) >= blocks, f"{blocks} blocks were wanted, and {len(self.free)} are free"
        taken = self.free[-blocks:][::-1] if blocks else []
        del self.free[len(self.free) - blocks :]
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.busy += not self.held[block]
            self.held[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """End a hold; a block that is neither held nor kept is free."""
        for block in reversed(blocks):
            self.held[block] -= 1
            self.busy -= not self.held[block]
            if not self.held[block] and not self.kept[block]:
                self.free.append(block)

    def keep(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.kept[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """End a keep."""
        for block in reversed(blocks):
            self.kept[block] -= 1
            if not self.held[block] and not self.kept[block]:
                self.free.append(block)

    def shared(self, block: int) -> bool:
        return self.held[block] + self.kept[block] > 1

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The keys and values of a block's first tokens, to another block, in all layers."""
        places_T = torch.arange(tokens)
        source_T, target_T = (to_device(block * BLOCK + places_T, self.device) for block in (source, target))
        for cache in self.layers.values():
            copy_tokens(cache, source_T, target_T)
        if self.routes_PLK is not None:
            self.routes_PLK[target_T] = self.routes_PLK[source_T]

    def _grow(self, size: int) -> None:
        for number, old in self.layers.items():
            *_, values = old
            heads = values.shape[1] if len(old) > 1 else 0  # a cache of latents has none
            new = new_cache(size, heads, values.shape[-1], self.dtype, self.device)
            for whole, part in zip(new, old, strict=True):
                whole[: self.size] = part
            self.layers[number] = new
        if self.routes_PLK is not None:
            routes_PLK = self._new_routes(size)
            routes_PLK[: self.size * BLOCK] = self.routes_PLK[:-1]
            self.routes_PLK = routes_PLK
        self.free = [*range(size - 1, self.size - 1, -1), *self.free]
        self.held += [0] * (size - self.size)
        self.kept += [0] * (size - self.size)
        self.size = size

    def layer(self, number: int, heads: int, width: int) -> LayerCache:
        if number not in self.layers:
            self.layers[number] = new_cache(self.size, heads, width, self.dtype, self.device)
        return self.layers[number]

    # -- routes ---------------------------------------------------------------------------------------------------
    def _new_routes(self, blocks: int) -> torch.Tensor:
        assert self.routes is not None
        shape = (blocks * BLOCK + 1, self.routes.layers, self.routes.top_k)  # one more: for rows that have ended
        return torch.zeros(shape, dtype=getattr(torch, self.routes.dtype.name), device=self.device)

    def read_routes(self, rows: Sequence[tuple[Sequence[int], int, int]]) -> list[np.ndarray]:
        """(tokens, L, K) of each row: the experts of its first tokens. A row is (blocks, gap, tokens)."""
        assert self.routes_PLK is not None
        places = []
        for blocks, gap, tokens in rows:
            position_T, starts_N = np.arange(tokens), np.asarray(block_starts(len(blocks), gap), np.int64)
            number_T = np.searchsorted(starts_N, position_T, side="right") - 1
            places.append(np.asarray(blocks, np.int64)[number_T] * BLOCK + position_T - starts_N[number_T])
        index_T = to_device(torch.from_numpy(np.concatenate(places)), self.device)
        found = self.routes_PLK[index_T].cpu().numpy()  # one copy for all rows: each waits for the device
        return np.split(found, np.cumsum([tokens for _, _, tokens in rows])[:-1])


def _nothing_to_evict(blocks: int) -> None:
    return
