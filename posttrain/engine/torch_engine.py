"""The torch train engine. Alone, a process holds the whole model; several cut it over themselves by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.engine.base import EngineLayout, EngineSettings, LossFn, Passes
from posttrain.engine.export import export_by_files
from posttrain.engine.facts import facts_of
from posttrain.engine.heads import Head, head_of
from posttrain.engine.optim import EngineState, Optimizer, whole
from posttrain.engine.packing import Rows, expert_counts, with_a_prediction
from posttrain.engine.ranks import Ranks, check_heads, group_ranks, this_rank
from posttrain.engine.runner import ComposedEngine, PassRunner, Stage
from posttrain.kernels.packed_attention import packed_rows
from posttrain.kernels.quantized import FP8
from posttrain.kernels.sequence_parallel import shared_sequence
from posttrain.models.adapter_files import adapter_parameters, trained_parameters
from posttrain.models.expert_adapters import base_name
from posttrain.models.forward import decoder_of, forward_mode_of, recompute_layers, without_adapters
from posttrain.models.fused_layer import join_weights, weights_unchanged
from posttrain.models.layer_weights import Fp8Base, check_fp8_base
from posttrain.models.lora import base_only, has_adapters, merge_into, merged_state, save_model
from posttrain.models.quantized import plain_weight
from posttrain.models.routing import RoutePass, RouteShape, route_shape, routed, watch_routers
from posttrain.protocol import DataProto


class TorchStage(Stage):
    """The whole model, or this rank's shard of every weight."""

    def __init__(self, module: torch.nn.Module, head: Head, settings: EngineSettings, *, packed: bool) -> None:
        self.module, self.head, self.settings, self.ranks = module, head, settings, settings.ranks
        self.forward_pass = head.torch_pass(module, packed=packed)
        self.fp8_base = Fp8Base() if settings.fp8 else None
        # Of a mixture's policy: how many tokens each expert got in this step, and its share of all, if that is wanted.
        self.routes = route_shape(module) if "log_probs" in head.outputs else None
        self.counts_LX: torch.Tensor | None = None
        self.load_LX: torch.Tensor | None = None
        if self.routes is not None:
            watch_routers(module)
        if self.ranks is not None:
            shard(self.forward_pass, module, self.ranks)
        else:  # q, k and v of a layer side by side in memory are one product; FSDP2 would move them apart again
            join_weights(module)

    def forward(
        self, rows: Rows, arrived: torch.Tensor | None, temperature: float, chunk: int = 0
    ) -> dict[str, torch.Tensor]:
        found = self.forward_pass(*self.head.inputs(rows, temperature))
        if self.routes is not None and rows.routes is not None and rows.routes.weight_T is not None:
            counts_LX = rows.routes.counts_LX(self.routes.experts)
            self.counts_LX = counts_LX if self.counts_LX is None else self.counts_LX.add_(counts_LX)
        return found

    @contextmanager
    def computing(self, rows: Rows) -> Iterator[None]:
        shared = shared_sequence(self.ranks.sequence if self.ranks else None)
        with packed_rows(rows.layout), shared, routed(rows.routes):
            yield

    @contextmanager
    def around_passes(self, optimizer: Optimizer | None) -> Iterator[None]:
        if self.ranks is not None:  # every pass gathers the weights anew, so that nothing made from them can be kept
            yield
            if optimizer is None:
                drop_whole_weights(self.forward_pass)
            return
        with weights_unchanged():  # what layers derive from their weights is kept over the passes of a call
            if optimizer is not None and self.settings.device.type == "cuda":
                optimizer.open_sums()
            yield

    def prepare_rows(self, rows: Rows) -> Rows:
        if rows.layout is not None:
            rows.layout.exact, rows.layout.fp8 = self.settings.exact, self.fp8_base
        rows.routes = self._routes(rows)
        return rows if self.ranks is None else with_a_prediction(rows)

    def _routes(self, rows: Rows) -> RoutePass | None:
        """What the routers do in a pass over these rows; None where they do as always and nothing is noted."""
        settings, given = self.settings, rows.routes
        records = settings.record_routes and not torch.is_grad_enabled()
        replays = settings.replay_routes and given is not None and not records
        if self.routes is None or not (torch.is_grad_enabled() or records or replays):
            return None
        routes = RoutePass() if given is None else given
        routes.shape, routes.replays, routes.keeps, routes.load_LX = self.routes, replays, records, self.load_LX
        if torch.is_grad_enabled():  # response tokens by the place that predicts them, however rows are packed
            predicted_N = rows.of_tokens(rows.predict_U)
            routes.weight_T = torch.zeros(rows.input_ids.numel(), device=predicted_N.device)
            routes.weight_T.index_add_(0, predicted_N, torch.ones_like(predicted_N, dtype=torch.float32))
        return routes

    def before_backward(self, *, last: bool) -> None:
        if self.ranks is not None:
            set_last_backward(self.forward_pass, last)


class TorchEngine(ComposedEngine):
    """A module, its optimizer (unless frozen), and packed passes over batches."""

    def __init__(self, module: torch.nn.Module, settings: EngineSettings, head: Head | None = None) -> None:
        self.module, self.settings, head = module, settings, head or head_of(module)
        way = forward_mode_of(module)
        packed = settings.pack and way.packed
        alone = not packed and not way.padded  # such a model gives other numbers beside padding
        facts = facts_of(
            module,
            packed=packed,
            share_prompts=settings.share_prompts,
            token_budget=settings.token_budget,
            max_rows=1 if alone else settings.max_rows,
            sequence_parallel=settings.ranks.sequence_size if settings.ranks else 1,
            pairs=head.pairs,
            rounding=FP8 if settings.fp8 else None,
        )
        check_heads(module.config, facts.sequence_parallel, packed=packed)
        if settings.fp8:
            check_fp8_base(module, settings.device, sharded=settings.ranks is not None)
        if settings.optim is None:
            module.requires_grad_(False)
        self.stage = TorchStage(module, head, settings, packed=packed)
        trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self.optimizer = Optimizer(trained, settings.optim) if settings.optim is not None else None
        if settings.gradient_checkpointing and self.optimizer is not None:
            recompute_layers(module)
        self.runner = PassRunner(self.stage, head, facts, settings, self.optimizer)
        # A sharded model is moved with the pass around it: that gathers the weights outside the layers, and would go
        # on with those where they were.
        movable = module if settings.ranks is None else self.stage.forward_pass
        self.state = EngineState(
            settings, self.optimizer, self._saved_weights, movable, together=settings.ranks is not None
        )
        self.offload()

    @classmethod
    def create(
        cls, module: torch.nn.Module, settings: EngineSettings, layout: EngineLayout, head: Head | None = None
    ) -> TorchEngine:
        ranks = group_ranks(settings.device, fsdp_size=layout.fsdp_size, sequence_size=layout.sequence_size)
        return cls(module, replace(settings, ranks=ranks), head)

    @classmethod
    def check_model(cls, config: Any, layout: EngineLayout, *, ranks: int, packed: bool) -> None:
        check_heads(config, layout.sequence_size, packed=packed)

    # -- mixtures -------------------------------------------------------------------------------------------------
    def update(
        self, data: DataProto, loss: LossFn, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, float]:
        stage = self.stage
        if stage.routes is None:
            return super().update(data, loss, temperature=temperature, passes=passes)
        stage.counts_LX = torch.zeros(stage.routes.layers, stage.routes.experts, device=self.settings.device)
        stage.load_LX = self._recorded_load(data, stage.routes) if self.settings.balance_load else None
        made = super().update(data, loss, temperature=temperature, passes=passes)
        load_LX = self._over_ranks(stage.counts_LX)  # on a rank without rows, too: others wait for it
        made["expert_load_max"] = float((load_LX.amax(1) / load_LX.mean(1).clamp(min=1e-30)).mean())
        return made

    def _recorded_load(self, data: DataProto, shape: RouteShape) -> torch.Tensor:
        """(L, X) the share of each expert in the choices that sampled tokens were predicted with. From the recorded
        routes of the whole mini-batch: shares of a pass alone would make the loss depend on how rows are split."""
        counts_LX = expert_counts(data, shape)
        total_LX = self._over_ranks(torch.from_numpy(counts_LX).to(self.settings.device))
        return total_LX / total_LX.sum(1, keepdim=True).clamp(min=1)

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if self.settings.ranks is not None:
            torch.distributed.all_reduce(values)
        return values

    # -- weights --------------------------------------------------------------------------------------------------
    def base_only(self) -> AbstractContextManager[None]:
        return base_only(self.module)

    def live_model(self) -> torch.nn.Module | None:
        return self.module if self.settings.ranks is None else None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.settings.ranks is not None:
            yield from whole_state(self.module, self.stage.forward_pass)
            return
        state = merged_state(self.module) if has_adapters(self.module) else self.module.state_dict()
        yield from state.items()

    def export_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in adapter_parameters(self.module).items():
            yield name, whole(weight.detach())

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        if self.settings.ranks is not None:
            with self.on_device():  # ranks gather weights on their devices: NCCL takes none in host memory
                export_from_ranks(self.module, self.stage.forward_pass, folder, adapter, merged=merged)
        else:
            save_model(self.module, folder, adapter, merged=merged)

    def _saved_weights(self) -> list[tuple[str, torch.Tensor]]:
        # With adapters only these are saved: the base does not change.
        adapters_only = has_adapters(self.module)
        return [(name, w) for name, w in self.module.named_parameters() if w.requires_grad or not adapters_only]


FSDPEngine = TorchEngine  # the name that verl's users know


# A model sharded over ranks by FSDP2: each layer is one unit, and the weights outside the layers belong to the pass.
#
# A layer's weights are whole on every rank only while it computes. A rank keeps its shard of every weight in the
# precision of the optimizer; weights are gathered in the precision of the model, which halves what travels. Exports
# gather a layer at a time, so that no rank holds more than one whole layer.


Named = list[tuple[str, torch.nn.Module]]
WIDE = (torch.float32, torch.float64)


def shard(forward_pass: torch.nn.Module, model: torch.nn.Module, ranks: Ranks) -> None:
    """Shard `model` over the ranks; from now on it computes inside `forward_pass` only.

    Fused layers must have been put in before: FSDP2 changes the class of a layer. Loaded weights are memory-mapped from
    their file, and all processes of a machine share those pages; a rank copies its shard a layer at a time, so that it
    never holds the whole model in memory of its own.
    """
    dtype = _widened_type(model)
    if dtype is None:
        policy = MixedPrecisionPolicy(reduce_dtype=None, cast_forward_inputs=False)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Packed 4-bit weights cannot be split along a dimension, and they are small: every rank keeps them whole.
    held = {weight for weight in model.parameters() if not weight.is_floating_point()}
    for part in (*_layers(decoder_of(model)), forward_pass):
        if dtype is not None:
            _widen(part)
        # `fully_shard` of the pass comes last: it takes only the weights that no layer has taken.
        ignored = {weight for weight in part.parameters() if weight in held} or None
        fully_shard(part, mesh=ranks.mesh, mp_policy=policy, ignored_params=ignored)
    for part in sharded_parts(forward_pass):
        part.set_force_sum_reduction_for_comms(True)  # token weights come from all ranks' rows: gradients are summed
        part.set_gradient_divide_factor(1.0)


def _widened_type(model: torch.nn.Module) -> torch.dtype | None:
    """The low precision of trained weights, which are kept in float32 and gathered in this type.

    None where all are wide already, as adapters are: beside them the base keeps its type.
    """
    low = {weight.dtype for weight in model.parameters() if weight.requires_grad and weight.dtype not in WIDE}
    if not low:
        return None
    (dtype,) = low
    return dtype


def _widen(part: torch.nn.Module) -> None:
    """Weights of this part that are not sharded yet, in float32."""
    for weight in part.parameters():
        if weight.is_floating_point() and not isinstance(weight, DTensor):
            weight.data = weight.data.float()


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of the stacks that lie in a model."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)


def sharded_parts(forward_pass: Any) -> list[FSDPModule]:
    """The layers and, last, the pass itself."""
    parts = [part for part in forward_pass.modules() if isinstance(part, FSDPModule)]
    return [*parts[1:], parts[0]]


def set_last_backward(forward_pass: torch.nn.Module, last: bool) -> None:
    """Whether copies of the model (HSDP) sum their gradients in the next pass: once per update, in its last pass, since
    the sum over passes travels as easily as that of one."""
    assert isinstance(forward_pass, FSDPModule)
    forward_pass.set_requires_all_reduce(last)
    forward_pass.set_is_last_backward(last)


def drop_whole_weights(forward_pass: torch.nn.Module) -> None:
    """After passes without gradient: FSDP2 leaves the weights of the outermost module gathered, and they would be stale
    after the next update."""
    assert isinstance(forward_pass, FSDPModule)
    forward_pass.reshard()


def owned_modules(model: torch.nn.Module, forward_pass: torch.nn.Module) -> Iterator[tuple[FSDPModule, Named]]:
    """By part, the modules of `model` (with their names) whose own weights are gathered with it."""
    found: dict[int, Named] = {id(part): [] for part in sharded_parts(forward_pass)}

    def walk(name: str, module: torch.nn.Module, part: int) -> None:
        part = id(module) if id(module) in found else part
        found[part].append((name, module))
        for own, child in module.named_children():
            walk(f"{name}.{own}" if name else own, child, part)

    walk("", model, id(forward_pass))
    for part in sharded_parts(forward_pass):
        yield part, found[id(part)]


@contextmanager
def whole_weights(part: FSDPModule) -> Iterator[None]:
    """Inside, the weights of this part are whole on every rank, as it computes with them."""
    part.unshard()
    try:
        yield
    finally:
        part.reshard()


def whole_state(model: torch.nn.Module, forward_pass: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of all weights under their Hugging Face names, adapters folded in. All ranks must iterate to the end:
    each layer is gathered by all of them."""
    for part, modules in owned_modules(without_adapters(model), forward_pass):
        with torch.no_grad(), whole_weights(part):
            copies = _copies(modules)
        yield from copies.items()


def _copies(modules: Named) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers of these modules; tied ones are one copy."""
    from peft.tuners.lora import LoraLayer

    adapted = {name: module for name, module in modules if isinstance(module, LoraLayer)}
    copies: dict[int, torch.Tensor] = {}  # by identity, which holds here: all modules of the part are alive
    found: dict[str, torch.Tensor] = {}
    for name, module in modules:
        if ".lora_" in f".{name}":
            continue
        kept = {key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for own, weight in (*module.named_parameters(recurse=False), *kept.items()):
            if weight is None:
                continue
            if id(weight) not in copies:
                copies[id(weight)] = plain_weight(weight).detach().clone()
            found[base_name(f"{name}.{own}")] = copies[id(weight)]
    for name, module in adapted.items():
        merge_into(found, name, module)
    return found


def export_from_ranks(
    model: torch.nn.Module,
    forward_pass: torch.nn.Module,
    folder: Path,
    adapter: Mapping[str, Any] | None,
    *,
    merged: bool,
) -> None:
    """A Hugging Face folder, written by rank 0 with what all ranks give it."""

    def save(part: Path, state: Mapping[str, torch.Tensor]) -> None:
        save_model(model, part, adapter, merged=merged, state=state)

    if adapter is not None and not merged:
        state = {name: whole(weight.detach()).cpu() for name, weight in trained_parameters(model).items()}
        if this_rank() == 0:
            save(folder, state)
    else:
        export_by_files(whole_state(model, forward_pass), folder, save)
