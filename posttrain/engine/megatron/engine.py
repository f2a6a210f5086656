"""The train engine of Megatron-Core: policy, reference or critic, cut over tensor, pipeline and expert ranks.

Passes, optimizer steps and memory are those of the other engine; what differs is where a layer's weights lie, how a
pass goes through them, and how gradients meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.checkpoint.dcp import read_checked, write_tensors
from posttrain.engine.base import LossFn, Passes
from posttrain.engine.export import host_copies
from posttrain.engine.facts import facts_of
from posttrain.engine.fsdp import EngineSettings, FSDPEngine, _order
from posttrain.engine.megatron.host import computing_on
from posttrain.engine.megatron.optim import CutOptimizer
from posttrain.engine.megatron.package import PACKAGE, MegatronError, version
from posttrain.engine.megatron.pipeline import Line, forward_and_backward, forward_only
from posttrain.engine.megatron.places import Sizes, take_places
from posttrain.engine.megatron.shapes import build, check_model
from posttrain.engine.megatron.stage import StagePass
from posttrain.engine.megatron.weights import CUT, exported, own_part, stage_matches
from posttrain.engine.packing import Rows
from posttrain.engine.ranks import this_rank, world_size
from posttrain.kernels.packed_attention import packed_rows
from posttrain.models.lora import has_adapters, save_model
from posttrain.models.value import ValueModel
from posttrain.models.ways import way_of
from posttrain.protocol import DataProto


class MegatronEngine(FSDPEngine):
    """A model from Hugging Face's modules, of which this rank takes its part and keeps nothing else but the shapes."""

    def __init__(self, module: torch.nn.Module, settings: EngineSettings, sizes: Sizes) -> None:
        self.settings, self.whole = settings, module
        self.values_only = isinstance(module, ValueModel)
        self.config: Any = module.config
        self.way = way_of(module)
        _check(module, settings, packed=self.way.packed)
        check_model(self.config, sizes)
        self.places = take_places(sizes, settings.device)
        self.packed = True
        self._facts = facts_of(
            module,
            packed=True,
            share_prompts=settings.share_prompts,
            token_budget=settings.token_budget,
            max_rows=settings.max_rows,
            sequence_parallel=sizes.tensor,
            pipeline=sizes.pipeline,
            engine=f"{PACKAGE} {version()} ({sizes.words()})",
        )
        self.module = self._take_part(module)
        recompute = settings.gradient_checkpointing and settings.optim is not None
        self.forward_pass = StagePass(
            self.module, self.config, self.places, self._angles, padding=self._padding, recompute=recompute
        )
        self.forward_pass.to(settings.device)
        trained = dict(self.module.named_parameters())
        self.line = Line(self.places.pipeline, settings.device, self._facts.dtype, self.config.hidden_size)
        self.optimizer: CutOptimizer | None = None
        if settings.optim is None:
            self.module.requires_grad_(False)
        else:
            cut = {name for match in self.matches if match.kind in CUT for name in match.ours}
            tied = bool(self.config.tie_word_embeddings) and not self.values_only
            self.optimizer = CutOptimizer(
                trained, settings.optim, self.places, cut=cut, saved=self._saved_names(), tied=tied
            )
        self.offload()

    def _take_part(self, module: torch.nn.Module) -> torch.nn.Module:
        """This rank's modules with their weights; of `module` only the shapes are left."""
        device, dtype = self.settings.device, self._facts.dtype
        rotation: Any = getattr(module, "base_model").rotary_emb  # noqa: B009
        self._angles = rotation.inv_freq.detach().clone()
        self._padding: int | None = getattr(module, "base_model").embed_tokens.padding_idx  # noqa: B009
        own: Any = build(self.config, self.places, device, dtype)
        if self.places.last and self.values_only:
            own.output_layer = None
            own.value_head = torch.nn.Linear(self.config.hidden_size, 1, device=device, dtype=dtype)
        elif self.places.last and self.places.first and self.config.tie_word_embeddings:
            own.output_layer.weight = own.embedding.word_embeddings.weight
        self.matches = stage_matches(self.config, self.places, self.places.stage, values=self.values_only)
        state, weights = module.state_dict(), dict(own.named_parameters())
        self.shapes = {name: weight.shape for name, weight in state.items()}
        filled: set[str] = set()
        for match in self.matches:
            parts = own_part(match, [state[name] for name in match.theirs], self.config, self.places)
            for name, part in zip(match.ours, parts, strict=True):
                assert weights[name].shape == part.shape, f"{name}: {tuple(weights[name].shape)}, {tuple(part.shape)}"
                weights[name].data.copy_(part)
                filled.add(name)
        assert filled == weights.keys(), f"weights without a match: {sorted(weights.keys() ^ filled)}"
        module.to("meta")
        return own

    def _saved_names(self) -> dict[str, str]:
        """What a checkpoint calls this rank's weights: layers and experts counted over all ranks; parts of tensor ranks
        say whose they are."""
        layers = self.config.num_hidden_layers // self.places.sizes.pipeline
        size, names = self.places.sizes.tensor, {}
        for match in self.matches:
            for number, name in enumerate(match.ours):
                saved = name
                if name.startswith("decoder.layers."):
                    own, _, rest = name.removeprefix("decoder.layers.").partition(".")
                    saved = f"decoder.layers.{int(own) + self.places.stage * layers}.{rest}"
                if match.kind == "experts":
                    whole = self.places.expert.rank() * len(match.ours) + number
                    saved = saved.replace(f".local_experts.{number}.", f".experts.{whole}.")
                if match.kind in CUT and size > 1:
                    saved += f".part_{self.places.tensor.rank()}_of_{size}"
                names[name] = saved
        return names

    # -- passes ---------------------------------------------------------------------------------------------------
    @contextmanager
    def _computing(self, rows: Rows) -> Iterator[None]:
        with packed_rows(rows.layout), computing_on(self.settings.device):
            yield

    @torch.no_grad()
    def _no_grad_pass(self, data: DataProto, temperature: float, passes: Passes | None) -> dict[str, torch.Tensor]:
        self.module.eval()
        passes = self._plan(data) if passes is None else passes
        order = _order(passes)
        cut = [(units, self._rows(data[order][here], units)) for units, here in self._counted(passes)]
        parts: dict[str, list[torch.Tensor]] = {}

        def forward(number: int, arrived: torch.Tensor | None) -> torch.Tensor | None:
            units, rows = cut[number]
            with self._computing(rows):
                found = self.forward_pass(rows, arrived, temperature)
            if not self.places.last:
                return found
            for name, values_U in found.items() if units else ():
                parts.setdefault(name, []).append(rows.scatter(values_U))
            return None

        forward_only(self.line, [rows.input_ids.shape[1] for _, rows in cut], forward)
        if not order:
            return {}
        place = torch.empty(len(data), dtype=torch.long)
        place[order] = torch.arange(len(order))
        return {name: values.cpu()[place] for name, values in self._told(parts, data).items()}

    def _told(self, parts: dict[str, list[torch.Tensor]], data: DataProto) -> dict[str, torch.Tensor]:
        """What the last stage found, on all of them."""
        if self.places.last:
            found = {name: torch.cat(part) for name, part in parts.items()}
        else:
            shape, wide = data.batch["responses"].shape, torch.promote_types(self._facts.dtype, torch.float32)
            names = ("values",) if self.values_only else ("log_probs", "entropy")
            found = {name: torch.empty(shape, dtype=wide, device=self.settings.device) for name in names}
        for values in found.values() if self.places.sizes.pipeline > 1 else ():
            dist.broadcast(values, group=self.places.pipeline, group_src=self.places.sizes.pipeline - 1)
        return found

    def _backward_passes(self, data: DataProto, loss: LossFn, temperature: float, passes: Passes | None) -> bool:
        optimizer = self.optimizer
        assert optimizer is not None
        self.module.eval()
        finite = torch.ones((), dtype=torch.bool, device=self.settings.device)
        passes = self._plan(data) if passes is None else passes
        ordered = data[_order(passes)]
        there = ordered[:].to(self.settings.device)
        cut = [(units, here, self._rows(ordered[here], units)) for units, here in self._counted(passes)]
        under_way: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

        def forward(number: int, arrived: torch.Tensor | None) -> torch.Tensor:
            nonlocal finite
            units, here, rows = cut[number]
            if arrived is not None:
                arrived.requires_grad_(True)
            with self._computing(rows):
                out = self.forward_pass(rows, arrived, temperature)
                if self.places.last:
                    found = {name: rows.scatter(values_U) for name, values_U in out.items()}
                    out = loss(there[here], found) if units else 0.0 * sum(part.sum() for part in found.values())
                    assert isinstance(out, torch.Tensor)
                    finite = finite & torch.isfinite(out.detach())
            under_way[number] = arrived, out
            return out

        def backward(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
            arrived, out = under_way.pop(number)
            with self._computing(cut[number][2]):
                torch.autograd.backward(out, gradient)
            optimizer.gather_gradients()
            return None if arrived is None else arrived.grad

        forward_and_backward(self.line, [rows.input_ids.shape[1] for _, _, rows in cut], forward, backward)
        optimizer.reduce_gradients()
        return bool(finite)

    # -- weights --------------------------------------------------------------------------------------------------
    @contextmanager
    def base_only(self) -> Iterator[None]:
        yield  # there are no adapters

    def live_model(self) -> torch.nn.Module | None:
        return None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self.module.named_parameters())
        yield from exported(
            weights, self.shapes, self.config, self.places, self.settings.device, values=self.values_only
        )

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        with self.on_device():
            state = host_copies(self.export_weights())
        if this_rank() == 0:
            save_model(self.whole, folder, adapter, merged=merged, state=state)

    def save(self, folder: Path) -> None:
        write_tensors(folder, self.state(), together=world_size() > 1)

    def load(self, folder: Path) -> None:
        """Of a run that was cut over as many tensor ranks; stages and expert ranks may be others."""
        state = self.state()
        read_checked(folder, state, partial=True)  # other stages and tensor ranks have theirs in it
        if self.optimizer:
            self.optimizer.loaded(state)

    def _kept_weights(self) -> list[tuple[str, torch.Tensor]]:
        saved = self._saved_names()
        return [(saved[name], weight) for name, weight in self.module.named_parameters()]


def _check(module: torch.nn.Module, settings: EngineSettings, *, packed: bool) -> None:
    """Refuses what this engine cannot do."""
    told = None
    if has_adapters(module):
        told = "adapters (model.lora_rank) are not built for it"
    elif not settings.pack:
        told = "rows are always packed in it, but actor_rollout_ref.model.use_remove_padding=false asks for padded ones"
    elif not packed:
        told = "rows of this model cannot be packed, and this engine computes no others"
    if told is not None:
        raise MegatronError(f"actor_rollout_ref.actor.strategy=megatron: {told}; set strategy=fsdp2")
