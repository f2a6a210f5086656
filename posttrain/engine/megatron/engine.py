"""The train engine of Megatron-Core: policy, reference, critic or reward model, cut over tensor, pipeline and expert
ranks.

Passes and optimizer steps are those of the shared pass runner; this module says where a layer's weights lie, and how
they become a Hugging Face model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from posttrain.config.train_engines import EngineKeys
from posttrain.engine.base import EngineLayout, EngineSettings
from posttrain.engine.export import host_copies
from posttrain.engine.facts import facts_of
from posttrain.engine.heads import Head, head_of
from posttrain.engine.layer_progress import LayerProgress
from posttrain.engine.megatron.host import computing_on
from posttrain.engine.megatron.optim import CutOptimizer
from posttrain.engine.megatron.package import PACKAGE, MegatronError, version
from posttrain.engine.megatron.places import Sizes, check_sizes, take_places
from posttrain.engine.megatron.shapes import build, check_model
from posttrain.engine.megatron.stage import StagePass
from posttrain.engine.megatron.weights import CUT, exported, own_part, stage_matches
from posttrain.engine.packing import Rows
from posttrain.engine.pipeline import Pipeline
from posttrain.engine.ranks import this_rank, world_size
from posttrain.engine.runner import ComposedEngine, PassRunner, Stage
from posttrain.engine.state import EngineState
from posttrain.kernels.packed_attention import packed_rows
from posttrain.models.lora import has_adapters, save_model
from posttrain.models.ways import way_of


class MegatronStage(Stage):
    """This rank's layers and, on the last stage of a pipeline, the head."""

    def __init__(self, forward_pass: StagePass, pipeline: Pipeline, device: torch.device) -> None:
        self.module, self.forward_pass = forward_pass.model, forward_pass
        self.pipeline, self.device = pipeline, device

    def forward(self, rows: Rows, arrived: torch.Tensor | None, temperature: float) -> Any:
        return self.forward_pass(rows, arrived, temperature)

    @contextmanager
    def computing(self, rows: Rows) -> Iterator[None]:
        with packed_rows(rows.layout), computing_on(self.device):
            yield


class MegatronEngine(ComposedEngine):
    """A model from Hugging Face's modules, of which this rank takes its part and keeps nothing else but the shapes."""

    def __init__(
        self, module: torch.nn.Module, settings: EngineSettings, sizes: Sizes, head: Head | None = None
    ) -> None:
        self.settings, self.whole, self.head = settings, module, head or head_of(module)
        self.config: Any = module.config
        _check(module, settings, sizes.keys)
        check_model(self.config, sizes)
        self.places = take_places(sizes, settings.device)
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
        rotation: Any = getattr(module, "base_model").rotary_emb  # noqa: B009
        padding: int | None = getattr(module, "base_model").embed_tokens.padding_idx  # noqa: B009
        angles = rotation.inv_freq.detach().clone()
        self.module = self._take_part(module, facts.dtype)
        recompute = settings.gradient_checkpointing and settings.optim is not None
        forward_pass = StagePass(
            self.module, self.config, self.places, angles, self.head, padding=padding, recompute=recompute
        ).to(settings.device)
        pipeline = Pipeline(self.places.pipeline, settings.device, facts.dtype, self.config.hidden_size)
        trained = dict(self.module.named_parameters())
        self.optimizer: CutOptimizer | None = None
        if settings.optim is None:
            self.module.requires_grad_(False)
        else:
            cut = {name for match in self.matches if match.kind in CUT for name in match.ours}
            self.optimizer = CutOptimizer(
                trained, settings.optim, self.places, cut=cut, saved=self._saved_names(), tied=self._tied
            )
        alone = world_size() == 1 and settings.device.type == "cpu"
        progress = LayerProgress(self.module) if alone else None
        self.stage = MegatronStage(forward_pass, pipeline, settings.device)
        self.runner = PassRunner(self.stage, self.head, facts, settings, self.optimizer, progress=progress)
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
        return cls(module, settings, Sizes.of(layout), head)

    @classmethod
    def check_model(cls, config: Any, layout: EngineLayout, *, ranks: int, packed: bool) -> None:
        sizes = Sizes.of(layout)
        check_model(config, sizes)
        check_sizes(sizes, ranks)

    @property
    def _tied(self) -> bool:
        """Whether the embedding predicts tokens, too."""
        return bool(self.config.tie_word_embeddings) and self.head.projection is None

    def _take_part(self, module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """This rank's modules with their weights; of `module` only the shapes are left."""
        device, projection = self.settings.device, self.head.projection
        own: Any = build(self.config, self.places, device, dtype)
        if self.places.last and projection is not None:
            own.output_layer = None
            bias = module.get_submodule(projection).bias is not None
            setattr(own, projection, torch.nn.Linear(self.config.hidden_size, 1, bias=bias, device=device, dtype=dtype))
        elif self.places.last and self.places.first and self._tied:
            own.output_layer.weight = own.embedding.word_embeddings.weight
        state, weights = module.state_dict(), dict(own.named_parameters())
        self.shapes = {name: weight.shape for name, weight in state.items()}
        self.matches = stage_matches(self.config, self.places, self.places.stage, self.head, self.shapes)
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

    def _saved_weights(self) -> list[tuple[str, torch.Tensor]]:
        saved = self._saved_names()
        return [(saved[name], weight) for name, weight in self.module.named_parameters()]

    def base_only(self) -> AbstractContextManager[None]:
        return nullcontext()  # there are no adapters

    def live_model(self) -> torch.nn.Module | None:
        return None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self.module.named_parameters())
        yield from exported(weights, self.shapes, self.config, self.places, self.settings.device, self.head)

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        with self.on_device():
            state = host_copies(self.export_weights())
        if this_rank() == 0:
            save_model(self.whole, folder, adapter, merged=merged, state=state)


def _check(module: torch.nn.Module, settings: EngineSettings, keys: EngineKeys) -> None:
    """Rejects what this engine cannot do."""
    problem = None
    if has_adapters(module):
        problem = "adapters (model.lora_rank) are not built for it"
    elif not settings.pack:
        key = f"{keys.model}.use_remove_padding"
        problem = f"rows are always packed in it, but {key}=false asks for padded ones"
    elif not way_of(module).packed:
        problem = "rows of this model cannot be packed, and this engine computes no others"
    if problem is not None:
        raise MegatronError(f"{keys.strategy}=megatron: {problem}; set strategy=fsdp2")
