"""The general way to decode with a paged cache: it runs transformers' own module, whatever its layers do (post-norms,
learned positions, experts), if its attention goes through transformers' attention interface. `decoder.py` is the fast
way for common architectures.

On a CUDA device whole decode steps are captured, like those of the fast way: kernels of the module are launched once,
and replayed for every token. Experts that are known here (`experts.py`) are multiplied by our kernels in these steps.

Shapes: T tokens of a step, B rows, H heads of queries, K heads of keys, D head size, C size of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from posttrain.kernels import cuda
from posttrain.kernels.decode import BLOCK, LayerCache, StepTokens, attention, latent_attention
from posttrain.kernels.scores import ScoreChanges
from posttrain.kernels.whole_step import DecodeRows
from posttrain.models.adapter_files import load_module
from posttrain.models.attention import LATENT_HEADS, keep_latents, paged_step
from posttrain.models.forward import accepted_arguments, decoder_of, logits_of
from posttrain.models.paged_modules import watch_experts, watch_norms
from posttrain.models.recurrent import answer_recurrence, recur_in_step
from posttrain.models.routing import RoutePass, routed

Caches = Callable[[int, int, int], LayerCache]


class _FlatStep:
    """Answers attention for the flat tokens of a step; notes the shapes of caches in `shapes`."""

    captured = False

    def __init__(self, step: StepTokens, caches: Caches, shapes: dict[int, tuple[int, int]]) -> None:
        self.step, self.caches, self.shapes = step, caches, shapes

    def _cache(self, layer: Any, heads: int, size: int) -> LayerCache:
        self.shapes[layer.layer_idx] = (heads, size)
        return self.caches(layer.layer_idx, heads, size)

    def attend(self, layer: Any, query_THD, key_TKD, value_TKD, *, scale: float, window, changes: ScoreChanges):
        cache = self._cache(layer, *key_TKD.shape[1:])
        given = (query_THD, key_TKD, value_TKD, cache, self.step)
        return attention(*given, scale=scale, window=window, changes=changes).view(query_THD.shape)

    def attend_latent(self, layer: Any, query_THC: torch.Tensor, latent_TC: torch.Tensor, *, rank: int, scale: float):
        cache = self._cache(layer, LATENT_HEADS, latent_TC.shape[1])
        return latent_attention(query_THC, latent_TC, cache, self.step, rank=rank, scale=scale)

    def recur(self, layer: Any, hidden_1TE: torch.Tensor) -> Any:
        return recur_in_step(layer, hidden_1TE, self.step)


class _CapturedStep:
    """The same for the newest tokens of rows in a captured step."""

    captured = True

    def __init__(self, rows: Any, caches: dict[int, LayerCache]) -> None:
        self.rows, self.caches = rows, caches

    def attend(self, layer: Any, query_BHD, key_BKD, value_BKD, *, scale: float, window, changes: ScoreChanges):
        from posttrain.kernels.cuda.paged_attention import decode_attention

        qkv_BC = torch.cat([query_BHD, key_BKD, value_BKD], 1).flatten(1)
        plain = {"rotation": None, "norms": None, "epsilon": 0.0}
        given = (qkv_BC, self.caches[layer.layer_idx], self.rows)
        return decode_attention(*given, scale=scale, window=window, changes=changes, **plain).view(query_BHD.shape)

    def attend_latent(self, layer: Any, query_BHC: torch.Tensor, latent_BC: torch.Tensor, *, rank: int, scale: float):
        from posttrain.kernels.cuda.latent_attention import decode_latents

        given = (query_BHC, latent_BC, self.caches[layer.layer_idx][0], self.rows)
        return decode_latents(*given, rank=rank, scale=scale)

    def recur(self, layer: Any, hidden_1TE: torch.Tensor) -> Any:
        raise NotImplementedError("steps of recurrent layers are not captured")


class PagedDecoder:
    """Computes hidden states and logits of flat tokens with the module itself. `captures`: rows decode in captured
    steps, which not every module allows; an engine is proved before it is used. Layers that make keys and values from
    latents cache these."""

    exact = False

    def __init__(self, module: Any, *, captures: bool) -> None:
        self.module, self.captures = module, captures
        self.shapes: dict[int, tuple[int, int]] = {}  # heads and head size in the cache, by layer
        self.graphs: Any = None
        self.captured_caches: dict[int, LayerCache] = {}
        self.captured_routes: torch.Tensor | None = None
        keep_latents(module)
        answer_recurrence(module)
        watch_experts(module, on=captures)
        watch_norms(module, on=captures)

    def hidden(
        self,
        step: StepTokens,
        caches: Caches,
        wanted_N: torch.Tensor | None = None,
        routes_PLK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return final hidden states of the wanted tokens (all, if None); all keys and values enter the caches, and the
        chosen experts `routes_PLK`, by the tokens' places in the cache."""
        answer = _FlatStep(step, caches, self.shapes)
        hidden_TE = self._through(answer, step.ids_T, step.positions_T, routes_PLK, lambda: step.slots_T)
        return hidden_TE if wanted_N is None else hidden_TE[wanted_N]

    def _through(self, answer: Any, ids_T, positions_T, routes_PLK: torch.Tensor | None, slots_T: Callable) -> Any:
        routes = None if routes_PLK is None else RoutePass(keeps=True)
        named: dict[str, Any] = {"use_cache": False, "position_ids": positions_T.long()[None]}
        if answer.captured:  # with a mask transformers does not look for borders in the positions, and so does not wait
            named["attention_mask"] = torch.ones_like(ids_T[None])
        with paged_step(answer), routed(routes):
            stack = decoder_of(self.module)
            output = stack(input_ids=ids_T[None], **accepted_arguments(stack, named))
        if routes_PLK is not None and routes is not None:
            routes_PLK[slots_T()] = routes.chosen_TLK().to(routes_PLK.dtype)
        return output.last_hidden_state[0]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return logits_of(self.module, hidden_NE)

    # -- captured steps -----------------------------------------------------------------------------------------------
    def decode(self, rows: DecodeRows, caches: Caches, routes_PLK: torch.Tensor | None = None) -> bool:
        """Decode for the rows' number of steps, if steps are captured; otherwise return False, and the module is called
        once per token."""
        if not self.captures or rows.drafts is not None:
            return False
        if not rows.steps:
            if self.graphs is not None:
                self.graphs.collect(rows)
            return True
        found = {layer: caches(layer, *shape) for layer, shape in self.shapes.items()}
        if self.graphs is None:
            self.graphs = self._new_graphs()
        weights = (*self.module.parameters(), *self.module.buffers())
        addresses = [tensor.data_ptr() for tensor in (*chain.from_iterable(found.values()), *weights)]
        addresses.append(0 if routes_PLK is None else routes_PLK.data_ptr())
        self.captured_caches, self.captured_routes = found, routes_PLK
        try:
            self.graphs.decode(rows, addresses)
        finally:
            # Only the pool may hold them: when it sleeps, their memory must be freed.
            self.captured_caches, self.captured_routes = {}, None
        return True

    def _new_graphs(self) -> Any:
        from posttrain.kernels.cuda.graphs import GraphedSteps

        weight = next(self.module.parameters())
        width = self.module.config.get_text_config().hidden_size
        vocabulary = self.logits(weight.new_zeros(1, width)).shape[1]
        heads = min(max(1, heads) for heads, _ in self.shapes.values())
        return GraphedSteps(self, vocabulary=vocabulary, key_heads=heads, block=BLOCK, device=weight.device)

    def next_hidden(self, tokens_B: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return final hidden states of each row's newest token, which enters the cache; all calls are captured."""
        answer = _CapturedStep(rows, self.captured_caches)
        with _no_waits(tokens_B.device):
            hidden = self._through(answer, tokens_B, rows.positions, self.captured_routes, lambda: rows.slots)
        return hidden.contiguous()

    def head_weight(self) -> torch.Tensor | None:
        """Return None: logits may be capped or scaled, so they are always written."""
        return None

    # -- weights ------------------------------------------------------------------------------------------------------
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights that this module does not already hold (it may be the trainer's own)."""
        load_module(self.module, weights)

    def make_fast_copies(self) -> None:
        """Do nothing: the module's own layers compute."""

    def drop_fast_copies(self) -> None: ...

    def without_fast_copies(self) -> AbstractContextManager[None]:
        """There are none."""
        return nullcontext()

    def let_go(self) -> None:
        """Drop captured steps if the weights were moved away: they hold memory, and are captured again."""
        if self.graphs is not None and not cuda.runs_here(next(self.module.parameters())):
            self.graphs.forget()


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    # A module that waits for the device cannot be captured. Here it raises in the run before the capture: a capture
    # that fails half-way would leave torch's allocator in its state.
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
