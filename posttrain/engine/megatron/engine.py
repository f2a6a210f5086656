"""The train engine of Megatron-Core: policy, reference, critic or reward model, cut over tensor, pipeline and expert
ranks.

Passes and optimizer steps are those of the shared pass runner; this module says where a layer's weights lie, how their
gradients are summed over ranks, and how they become a Hugging Face model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.config.optim import OptimConfig
from posttrain.engine.base import EngineLayout, EngineSettings
from posttrain.engine.facts import facts_of
from posttrain.engine.heads import Head, head_of
from posttrain.engine.megatron.groups import ParallelSizes, RankGroups, check_sizes, join_groups
from posttrain.engine.megatron.model import build, check_model, stage_layers
from posttrain.engine.megatron.package import PACKAGE, MegatronError, version
from posttrain.engine.megatron.stage import MegatronStage
from posttrain.engine.megatron.weights import CUT, exported, named_weights, own_part, stage_matches
from posttrain.engine.optim import EngineState, Optimizer
from posttrain.engine.pipeline import Pipeline
from posttrain.engine.ranks import this_rank, world_size
from posttrain.engine.runner import ComposedEngine, PassRunner
from posttrain.engine.settings import EngineKeys
from posttrain.engine.sharding import host_copies
from posttrain.models.forward import forward_mode_of
from posttrain.models.lora import has_adapters, save_model

EXPERT, QUERY_NORMS = ".local_experts.", (".q_layernorm.", ".k_layernorm.")
TIED_COPY = "output_layer.weight"


class MegatronOptimizer(Optimizer):
    """`named` are this rank's weights; `cut` are the names of those that tensor ranks hold parts of, `saved` the names
    in a checkpoint. `tied`: the first and the last stage of a pipeline both hold the embedding."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        groups: RankGroups,
        *,
        cut: set[str],
        saved: Mapping[str, str],
        tied: bool,
    ) -> None:
        super().__init__([(saved[name], weight) for name, weight in named.items()], config)
        self.own_names, self.groups, self.cut = list(named), groups, cut
        self.tied = tied and groups.sizes.pipeline > 1

    def reduce_gradients(self) -> None:
        """Sum each weight's gradient over the ranks that hold it and saw other tokens or other heads."""
        groups = self.groups
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is None:
                master.grad = torch.zeros_like(master)  # no token was routed to this expert; others wait for its sum
            if any(kind in name for kind in QUERY_NORMS):  # a tensor rank saw its own heads only
                dist.all_reduce(master.grad, group=groups.tensor)
            if self.tied and groups.ends is not None and name in (TIED_COPY, "embedding.word_embeddings.weight"):
                dist.all_reduce(master.grad, group=groups.ends)
            if EXPERT in name:  # all tensor ranks send the same tokens to it, so that each counts that often
                dist.all_reduce(master.grad, group=groups.expert_data)
                master.grad /= groups.sizes.tensor
            else:
                dist.all_reduce(master.grad, group=groups.data)

    def _holders(self, name: str) -> float:
        """How many ranks hold this same part of a weight."""
        groups = self.groups
        if EXPERT in name:
            return groups.expert_data.size()
        return groups.data.size() * (1 if name in self.cut else groups.tensor.size())

    def clip_gradients(self, largest: float) -> torch.Tensor:
        # A weight with several holders must count once in the norm: each adds its share of the squares.
        squares = torch.zeros((), dtype=torch.float64, device=self.masters[0].device)
        for name, master in zip(self.own_names, self.masters, strict=True):
            if master.grad is not None and not (self.tied and name == TIED_COPY):
                squares += master.grad.double().square().sum() / self._holders(name)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = float((largest / (norm + 1e-6)).clamp(max=1.0))
        for master in self.masters if factor < 1.0 else ():
            if master.grad is not None:
                master.grad *= factor
        return norm


class MegatronEngine(ComposedEngine):
    """A model from Hugging Face's modules, of which this rank takes its part and keeps nothing else but the shapes."""

    def __init__(
        self, module: torch.nn.Module, settings: EngineSettings, sizes: ParallelSizes, head: Head | None = None
    ) -> None:
        self.settings, self.whole, self.head = settings, module, head or head_of(module)
        self.config: Any = module.config
        _check(module, settings, sizes.keys)
        check_model(self.config, sizes)
        self.groups = join_groups(sizes, settings.device)
        facts = facts_of(
            module,
            packed=True,
            share_prompts=settings.share_prompts,
            token_budget=settings.token_budget,
            max_rows=settings.max_rows,
            sequence_parallel=sizes.tensor,
            pairs=self.head.pairs,
            pipeline=sizes.pipeline,
            engine=f"{PACKAGE} {version()} ({sizes.words()})",
        )
        decoder: Any = getattr(module, "base_model")  # noqa: B009
        angles, padding = decoder.rotary_emb.inv_freq.detach().clone(), decoder.embed_tokens.padding_idx
        self.module = self._take_part(module, facts.dtype)
        trained = dict(self.module.named_parameters())
        self.optimizer: MegatronOptimizer | None = None
        if settings.optim is None:
            self.module.requires_grad_(False)
        else:
            cut = {name for match in self.matches if match.kind in CUT for name in match.ours}
            self.optimizer = MegatronOptimizer(
                trained, settings.optim, self.groups, cut=cut, saved=self._saved_names(), tied=self._tied
            )
        stage = MegatronStage(
            self.module,
            self.config,
            self.groups,
            Pipeline(self.groups.pipeline, settings.device, facts.dtype, self.config.hidden_size),
            self.head,
            angles,
            device=settings.device,
            padding=padding,
            recompute=settings.gradient_checkpointing and settings.optim is not None,
        )
        self.runner = PassRunner(stage, self.head, facts, settings, self.optimizer)
        # Of a run with as many tensor ranks a checkpoint can be loaded; stages and expert ranks may be others, so that
        # it holds weights that this rank does not have.
        self.state = EngineState(
            settings, self.optimizer, self._saved_weights, self.module, together=world_size() > 1, parts=True
        )
        self.offload()

    @classmethod
    def create(
        cls, module: torch.nn.Module, settings: EngineSettings, layout: EngineLayout, head: Head | None = None
    ) -> MegatronEngine:
        return cls(module, settings, ParallelSizes.of(layout), head)

    @classmethod
    def check_model(cls, config: Any, layout: EngineLayout, *, ranks: int, packed: bool) -> None:
        sizes = ParallelSizes.of(layout)
        check_model(config, sizes)
        check_sizes(sizes, ranks)

    @property
    def _tied(self) -> bool:
        """Whether the embedding predicts tokens, too."""
        return bool(self.config.tie_word_embeddings) and self.head.projection is None

    def _take_part(self, module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """This rank's modules with their weights; of `module` only the shapes are left."""
        device, projection = self.settings.device, self.head.projection
        own: Any = build(getattr(module, "base_model"), self.groups, device, dtype)  # noqa: B009
        if self.groups.last and projection is not None:
            own.output_layer = None
            bias = module.get_submodule(projection).bias is not None
            setattr(own, projection, torch.nn.Linear(self.config.hidden_size, 1, bias=bias, device=device, dtype=dtype))
        elif self.groups.last and self.groups.first and self._tied:
            own.output_layer.weight = own.embedding.word_embeddings.weight
        state, weights = module.state_dict(), named_weights(own)
        self.shapes = {name: weight.to("meta") for name, weight in state.items()}
        self.matches = stage_matches(self.config, self.groups, self.groups.stage, self.head, self.shapes)
        filled: set[str] = set()
        for match in self.matches:
            parts = own_part(match, [state[name] for name in match.theirs], self.config, self.groups)
            for name, part in zip(match.ours, parts, strict=True):
                assert weights[name].shape == part.shape, f"{name}: {tuple(weights[name].shape)}, {tuple(part.shape)}"
                if isinstance(weights[name], torch.nn.Parameter):
                    weights[name].data.copy_(part)
                else:  # a buffer keeps the type that it has in the Hugging Face model
                    weights[name].data = part.to(device, copy=True)
                filled.add(name)
        assert filled == weights.keys(), f"weights without a match: {sorted(weights.keys() ^ filled)}"
        module.to("meta")
        return own

    def _saved_names(self) -> dict[str, str]:
        """What a checkpoint calls this rank's weights: layers and experts counted over all ranks; parts of tensor ranks
        say whose they are."""
        first = stage_layers(self.config, self.groups.sizes, self.groups.stage).start
        size, names = self.groups.sizes.tensor, {}
        for match in self.matches:
            for number, name in enumerate(match.ours):
                saved = name
                if name.startswith("decoder.layers."):
                    own, _, rest = name.removeprefix("decoder.layers.").partition(".")
                    saved = f"decoder.layers.{int(own) + first}.{rest}"
                if match.kind == "experts":
                    whole = self.groups.expert.rank() * len(match.ours) + number
                    saved = saved.replace(f".local_experts.{number}.", f".experts.{whole}.")
                if match.kind in CUT and size > 1:
                    saved += f".part_{self.groups.tensor.rank()}_of_{size}"
                names[name] = saved
        return names

    def _saved_weights(self) -> list[tuple[str, torch.Tensor]]:
        saved = self._saved_names()
        return [(saved[name], weight) for name, weight in named_weights(self.module).items()]

    def base_only(self) -> AbstractContextManager[None]:
        return nullcontext()  # there are no adapters

    def live_model(self) -> torch.nn.Module | None:
        return None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = named_weights(self.module)
        yield from exported(weights, self.shapes, self.config, self.groups, self.settings.device, self.head)

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        with self.on_device():
            state = host_copies(self.export_weights())
        if this_rank() == 0:
            save_model(self.whole, folder, adapter, merged=merged, state=state)


def _check(module: torch.nn.Module, settings: EngineSettings, keys: EngineKeys) -> None:
    problem = None
    if has_adapters(module):
        problem = "adapters (model.lora_rank) are not built for it"
    elif not settings.pack:
        key = f"{keys.model}.use_remove_padding"
        problem = f"rows are always packed in it, but {key}=false asks for padded ones"
    elif not forward_mode_of(module).packed:
        problem = "rows of this model cannot be packed, and this engine computes no others"
    if problem is not None:
        raise MegatronError(f"{keys.strategy}=megatron: {problem}; set strategy=fsdp2")
