"""The train engine of Megatron-Core: policy, reference, critic or reward model, cut over tensor, pipeline and expert
ranks.

Passes and optimizer steps are those of the shared pass runner; this module says where a layer's weights lie, how their
gradients are summed over ranks, and how they become a Hugging Face model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from posttrain.engine.base import EngineLayout, EngineSettings
from posttrain.engine.export import export_by_files, host_copies
from posttrain.engine.facts import facts_of
from posttrain.engine.heads import Head, head_of
from posttrain.engine.megatron.adapters import adapt, adapter_matches, adapters_off, check_adapters, scalings_of
from posttrain.engine.megatron.groups import ParallelSizes, check_sizes, join_groups
from posttrain.engine.megatron.model import build, check_model, head_size, is_latent, stage_chunks, stage_layers
from posttrain.engine.megatron.optimizer import EMBEDDING, TIED_COPY, MegatronOptimizer
from posttrain.engine.megatron.package import PACKAGE, MegatronError, version
from posttrain.engine.megatron.stage import MegatronStage
from posttrain.engine.megatron.weights import (
    CUT,
    Cut,
    Match,
    PartState,
    exported,
    named_weights,
    own_part,
    stage_matches,
    whole_weights,
)
from posttrain.engine.pipeline import Pipeline
from posttrain.engine.ranks import this_rank, world_size
from posttrain.engine.runner import ComposedEngine, PassRunner
from posttrain.engine.settings import EngineKeys
from posttrain.models.adapter_files import stored_name
from posttrain.models.expert_adapters import base_name
from posttrain.models.forward import decoder_of, forward_mode_of, without_adapters
from posttrain.models.lora import has_adapters, save_model

QUERY_NORMS = (".q_layernorm.", ".k_layernorm.")


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
            sequence_parallel=sizes.tensor * sizes.context,
            pairs=self.head.pairs,
            pipeline=sizes.pipeline,
            engine=f"{PACKAGE} {version()} ({sizes.words()})",
        )
        decoder: Any = decoder_of(module)
        angles, padding = decoder.rotary_emb.inv_freq.detach().clone(), decoder.embed_tokens.padding_idx
        self.module = self._take_part(module, facts.dtype)
        self.optimizer = self._make_optimizer(settings, sizes)
        stage = MegatronStage(
            self.module,
            self.config,
            self.groups,
            Pipeline(self.groups.pipeline, settings.device, facts.dtype, self.config.hidden_size, sizes.virtual),
            self.head,
            angles,
            chunks=self._chunks(),
            device=settings.device,
            padding=padding,
            recompute=settings.gradient_checkpointing and settings.optim is not None,
            # Latent attention rotates a part of its heads itself, and Megatron-Core does where heads turn in part only.
            rotates=not is_latent(self.config) and 2 * len(angles) == head_size(self.config),
        )
        self.runner = PassRunner(stage, self.head, facts, settings, self.optimizer)
        self.state = PartState(
            settings,
            self.optimizer,
            self._saved_weights,
            self.module,
            together=world_size() > 1,
            cuts=self._cuts(),
            groups=self.groups,
        )
        self.offload()

    def _make_optimizer(self, settings: EngineSettings, sizes: ParallelSizes) -> MegatronOptimizer | None:
        """The optimizer of this stage's weights; None, and frozen weights, for a model that is not trained."""
        if settings.optim is None:
            self.module.requires_grad_(False)
            return None
        trained = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        if not trained:
            raise MegatronError(
                f"{sizes.key}.pipeline_parallel_size={sizes.pipeline}: stage {self.groups.stage} has no adapters, "
                "so that nothing would be trained there; adapt all layers, or set pipeline_parallel_size=1"
            )
        return MegatronOptimizer(
            trained,
            settings.optim,
            self.groups,
            cut={name for match in self.matches if match.kind in CUT for name in match.ours},
            shares=self._shared_gradients(),
            saved=self._saved_names(),
            tied=self._tied,
        )

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
        device, projection, base = self.settings.device, self.head.projection, without_adapters(module)
        own: Any = build(decoder_of(module), self.groups, device, dtype)
        if self.groups.last and projection is not None:
            own.output_layer = None
            bias = base.get_submodule(projection).bias is not None
            setattr(own, projection, torch.nn.Linear(self.config.hidden_size, 1, bias=bias, device=device, dtype=dtype))
        elif self.groups.last and self.groups.first and self._tied:
            own.output_layer.weight = own.embedding.word_embeddings.weight
        # peft calls a matrix that it adapts `base_layer`.
        state = {base_name(name): weight for name, weight in base.state_dict(keep_vars=True).items()}
        self.shapes = {name: weight.detach().to("meta") for name, weight in state.items()}
        self.adapted = scalings_of(module) if has_adapters(module) else {}
        stages = range(self.groups.sizes.pipeline)
        everywhere = [match for stage in stages for match in self._stage_matches(stage)]
        check_adapters(everywhere, self.adapted, self.groups.sizes.keys)
        self.matches = self._stage_matches(self.groups.stage)
        adapt(own, self.matches, self.adapted, self.shapes, self.config.num_key_value_heads, self.groups, device)
        self.matches += adapter_matches(self.matches, self.adapted)
        weights, filled = named_weights(own), set[str]()
        for match in self.matches:
            theirs = [state[name] for name in match.theirs]
            parts = own_part(match, [weight.detach() for weight in theirs], self.config, self.groups)
            for name, part in zip(match.ours, parts, strict=True):
                assert weights[name].shape == part.shape, f"{name}: {tuple(weights[name].shape)}, {tuple(part.shape)}"
                if isinstance(weights[name], torch.nn.Parameter):
                    weights[name].data.copy_(part)
                    weights[name].requires_grad_(theirs[0].requires_grad)
                else:  # a buffer keeps the type that it has in the Hugging Face model
                    weights[name].data = part.to(device, copy=True)
                filled.add(name)
        assert filled == weights.keys(), f"weights without a match: {sorted(weights.keys() ^ filled)}"
        module.to("meta")
        return own

    def _chunks(self) -> list[slice]:
        """Chunk by chunk, which of this rank's layers."""
        lengths = [len(chunk) for chunk in stage_chunks(self.config, self.groups.sizes, self.groups.stage)]
        return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _stage_matches(self, stage: int) -> list[Match]:
        return stage_matches(self.config, self.groups.sizes, stage, self.head, self.shapes)

    def _saved_names(self) -> dict[str, str]:
        """What a checkpoint calls this rank's weights: layers and experts are counted over all ranks."""
        layers = stage_layers(self.config, self.groups.sizes, self.groups.stage)
        names = {}
        for match in self.matches:
            for number, name in enumerate(match.ours):
                saved = name
                if name.startswith("decoder.layers."):
                    own, _, rest = name.removeprefix("decoder.layers.").partition(".")
                    saved = f"decoder.layers.{layers[int(own)]}.{rest}"
                if name == TIED_COPY and self._tied:
                    saved = EMBEDDING  # one entry for both ends, so that any number of stages can continue it
                if match.kind == "experts":
                    whole = self.groups.expert.rank() * len(match.ours) + number
                    saved = saved.replace(f".local_experts.{number}.", f".experts.{whole}.")
                names[name] = saved
        return names

    def _shared_gradients(self) -> set[str]:
        """Weights that all tensor ranks hold whole, but use for other heads or other tokens than the others do."""
        whole = {name for match in self.matches if match.kind == "same" for name in match.ours}
        if not self.groups.sizes.sequence:
            return {name for name in whole if any(norm in name for norm in QUERY_NORMS)}
        projection = self.head.projection  # all tensor ranks compute it for all tokens
        return {name for name in whole if projection is None or not name.startswith(f"{projection}.")}

    def _cuts(self) -> dict[str, Cut]:
        """Weights that tensor ranks hold parts of, by their names in a checkpoint."""
        saved = self._saved_names()
        return {
            saved[name]: Cut(match.kind, len(self.shapes[match.theirs[0]]))
            for match in self.matches
            if match.kind in CUT
            for name in match.ours
        }

    def _saved_weights(self) -> list[tuple[str, torch.Tensor]]:
        saved = self._saved_names()
        # With adapters only what is trained is saved: the base does not change.
        return [
            (saved[name], weight)
            for name, weight in named_weights(self.module).items()
            if weight.requires_grad or not self.adapted
        ]

    def base_only(self) -> AbstractContextManager[None]:
        return adapters_off(self.module)

    def live_model(self) -> torch.nn.Module | None:
        return None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        embedding = f"{self.head.decoder}.embed_tokens.weight"

        def wanted(stage: int) -> list[Match]:
            # The last stage's copy of a tied embedding is sent with the first one's.
            tied = self.config.tie_word_embeddings
            return [m for m in self._stage_matches(stage) if not (tied and m.ours == (TIED_COPY,))]

        for name, weight in self._exported(wanted, self._with_adapters):
            yield name, weight
            if name == embedding and self._tied:
                yield "lm_head.weight", weight

    def _exported(
        self, matches: Callable[[int], list[Match]], change: Any = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        weights = named_weights(self.module)
        yield from exported(weights, self.shapes, self.config, self.groups, self.settings.device, matches, change)

    def _with_adapters(self, match: Match, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole weights with their adapters folded in."""
        weights, whole = named_weights(self.module) if self.adapted else {}, {}
        for one in adapter_matches([match], self.adapted):
            ours = [weights[name].detach() for name in one.ours]
            (whole[one.theirs[0]],) = whole_weights(one, ours, self.shapes, self.config, self.groups)
        for place, name in enumerate(match.theirs):
            if (linear := name.removesuffix(".weight")) in self.adapted:
                first, second = (whole[f"{linear}.lora_{letter}.default.weight"] for letter in "AB")
                found[place] = found[place] + (second @ first * self.adapted[linear]).to(found[place].dtype)
        return found

    def export_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the contract says, with the fully trained head of a reward model or critic."""

        def wanted(stage: int) -> list[Match]:
            matches, projection = self._stage_matches(stage), self.head.projection
            heads = [m for m in matches if projection is not None and m.ours[0].startswith(f"{projection}.")]
            return [*adapter_matches(matches, self.adapted), *heads]

        for name, weight in self._exported(wanted):
            yield f"base_model.model.{stored_name(name)}", weight

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        def save(part: Path, state: Mapping[str, torch.Tensor]) -> None:
            save_model(self.whole, part, adapter, merged=merged, state=state)

        with self.on_device():
            if adapter is None or merged:
                export_by_files(self.export_weights(), folder, save)
                return
            state = host_copies(self.export_adapters())
        if this_rank() == 0:
            save(folder, state)


def _check(module: torch.nn.Module, settings: EngineSettings, keys: EngineKeys) -> None:
    problem = None
    if not settings.pack:
        key = f"{keys.model}.use_remove_padding"
        problem = f"rows are always packed in it, but {key}=false asks for padded ones"
    elif not forward_mode_of(module).packed:
        problem = "rows of this model cannot be packed, and this engine computes no others"
    if problem is not None:
        raise MegatronError(f"{keys.strategy}=megatron: {problem}; set {keys.strategy}=fsdp2")
