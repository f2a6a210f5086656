"""Layers with a recurrent state (gated delta rule, Mamba, short convolutions) over packed tokens and in paged steps.

Such a layer of transformers computes a rectangle of sequences, and reads and writes its states through the interface of
transformers' cache. Here tokens lie end to end, so the layer's own code is called once for each group of sequences that
fit into a rectangle, with a cache that holds the states of these sequences alone. In a paged step the states come from
the engine's store and go back to it. In a packed pass responses continue from the state behind their prompt, which is
computed once; gradients flow through it.

Shapes: B sequences of a group, L tokens of each, T tokens of a pass, E width of the layer.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from posttrain.kernels.decode import StepTokens
from posttrain.kernels.packed_attention import PackedLayout, active_layout
from posttrain.kernels.segments import SegmentPlan, segment_plan
from posttrain.kernels.sequence_parallel import sequence_group
from posttrain.models.attention import active_step

Held = dict[tuple[str, int], torch.Tensor]
"""States of a layer's sequences by kind and number, as transformers names them."""

# What transformers calls layers; a "hybrid" one has attention and a state.
ATTENDING = {"full_attention", "sliding_attention", "attention", "hybrid"}
STATEFUL = {"linear_attention", "mamba", "conv", "hybrid"}
CONV, RECURRENT = "conv", "recurrent"
_WRITERS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}  # methods of transformers' caches
_CACHES = ("cache_params", "past_key_values")  # what layers call their cache


class CallStates:
    """transformers' interface of a cache, for one call of one layer: the states of that call's sequences.

    Nothing is changed in place here, so autograd sees how states go on.
    """

    def __init__(self, held: Held | None = None) -> None:
        self.held: Held = dict(held or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.held.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.held.get((RECURRENT, state_idx))

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """The inputs of a convolution with those before them (zeros at a sequence's beginning); keeps the last ones."""
        before = self.held.get((CONV, state_idx))
        if before is not None:
            width, inputs = before.shape[-1], torch.cat([before, new], -1)
        else:
            width = conv_kernel_size or new.shape[-1]
            inputs = torch.nn.functional.pad(new, (max(0, width - new.shape[-1]), 0))
        self.held[CONV, state_idx] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.held[RECURRENT, state_idx] = new
        return new

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, new: torch.Tensor) -> None:
        self.update_recurrent_state(new, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(state_idx in (None, number) for _, number in self.held)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def layers(self) -> LayerStates:
        """Where layers of transformers 5.17 read their states; later ones call the methods above."""
        return LayerStates(self.held)


class LayerStates:
    """`cache.layers[number]`, of any number: a call's states are those of one layer."""

    record_past = False

    def __init__(self, held: Held) -> None:
        self.conv_states, self.recurrent_states = StatesOfKind(held, CONV), StatesOfKind(held, RECURRENT)

    def __getitem__(self, layer_idx: int) -> LayerStates:
        return self


class StatesOfKind:
    """States by their number. Layers write to what they are given, so that is a copy, which is kept."""

    def __init__(self, held: Held, kind: str) -> None:
        self.held, self.kind = held, kind

    def __getitem__(self, state_idx: int) -> torch.Tensor:
        self.held[self.kind, state_idx] = self.held[self.kind, state_idx].clone()
        return self.held[self.kind, state_idx]


def recurrent_layers(model: torch.nn.Module) -> list[Any]:
    """The modules of a model that keep states in transformers' cache."""
    return [module for module in model.modules() if _WRITERS & _names_in(type(module)) and _arguments(type(module))[1]]


@lru_cache
def _names_in(kind: type) -> frozenset[str]:
    functions = [inspect.unwrap(value) for value in vars(_own_class(kind)).values() if inspect.isfunction(value)]
    return frozenset(name for function in functions for name in function.__code__.co_names)


def _own_class(kind: type) -> type:
    # FSDP puts a class of its own before the module's.
    return next((base for base in kind.__mro__ if base.__module__.startswith("transformers")), kind)


@lru_cache
def _arguments(kind: type) -> tuple[str, str | None, tuple[str, ...]]:
    """What a layer's `forward` calls its input and its cache, and what else it requires."""
    _, first, *others = inspect.signature(inspect.unwrap(kind.forward)).parameters.values()
    cache = next((name for name in _CACHES if any(name == each.name for each in others)), None)
    required = [each for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return first.name, cache, tuple(each.name for each in required if each.name != cache)


def attending_layers(model: Any) -> int:
    """How many layers keep something of every token."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None or not recurrent_layers(model):
        return config.num_hidden_layers
    return sum(kind in ATTENDING for kind in kinds)


def answer_recurrence(model: torch.nn.Module) -> bool:
    """Have the model's recurrent layers take packed sequences and paged steps from now on. Whether there are any."""
    layers, of_kind = recurrent_layers(model), dict[type, bool]()
    for number, layer in enumerate(layers):
        layer.state_number = number
        if not hasattr(layer, "can_continue"):
            kind = type(layer)
            if kind not in of_kind:
                of_kind[kind] = _can_continue(model, layer)
            layer.can_continue = of_kind[kind]
        layer.forward = types.MethodType(_answered, layer)
    return bool(layers)


@torch.no_grad()
def _can_continue(model: Any, layer: Any) -> bool:
    """Whether the layer continues from its states with several tokens at once; Mamba's first version reads them with
    single tokens only, and begins anew otherwise."""
    weight = next(layer.parameters())
    if weight.is_meta:
        return True
    hidden = torch.ones(1, 2, model.config.get_text_config().hidden_size, dtype=model.dtype, device=weight.device)
    cache = CallStates()
    _call(layer, hidden, cache)
    states = [cache.held, *({**cache.held, name: value + 100.0} for name, value in cache.held.items())]
    plain, *changed = (_output(_call(layer, hidden, CallStates(held))) for held in states)
    return not any(torch.equal(plain, other) for other in changed)


def _answered(self: Any, *args: Any, **kwargs: Any) -> Any:
    paged, layout = active_step(), active_layout()
    hidden_1TE = args[0] if args else kwargs[_arguments(type(self))[0]]
    if paged is None and layout is None:
        with _torch_on_meta(hidden_1TE):
            return type(self).forward(self, *args, **kwargs)
    if paged is not None:
        return paged.recur(self, hidden_1TE)
    assert layout is not None
    if sequence_group() is not None:
        raise NotImplementedError("recurrent layers do not compute a sequence on several ranks")
    layout.answered += 1
    return _packed(self, hidden_1TE, layout)


def _call(layer: Any, hidden_BLE: torch.Tensor, states: CallStates | None) -> Any:
    # Masks and borders of sequences are those of packed tokens; in a rectangle there is nothing to say.
    _, cache, required = _arguments(type(layer))
    named = {**dict.fromkeys(required), str(cache): states}
    with _torch_on_meta(hidden_BLE):
        return type(layer).forward(layer, hidden_BLE, **named)


@contextmanager
def _torch_alone() -> Iterator[None]:
    # In place of flash-linear-attention, causal_conv1d and mamba_ssm, which transformers calls wherever they are
    # installed, on any device, unless a model is being exported. Only that choice is changed: its code for exported
    # models needs more memory.
    from transformers.integrations import hub_kernels

    module: Any = hub_kernels
    was, module.is_torchdynamo_exporting = module.is_torchdynamo_exporting, lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_exporting = was


def _torch_on_meta(hidden_BLE: torch.Tensor) -> AbstractContextManager[None]:
    # Their kernels are launched on the addresses of tensors, and those of the meta device have none.
    return _torch_alone() if hidden_BLE.is_meta else nullcontext()


Outputs = list[tuple[Any, torch.Tensor | None]]


def _joined(outputs: Outputs, order_T: torch.Tensor) -> Any:
    """The outputs of groups as that of one row (1, T, ...). Each is what a layer gave, and the places that are wanted
    of it (None: all)."""
    flat = [_output(made).flatten(0, 1) for made, _ in outputs]
    flat = [made if wanted is None else made[wanted] for made, (_, wanted) in zip(flat, outputs, strict=True)]
    joined, first = torch.cat(flat)[order_T][None], outputs[0][0]
    # What a layer gives beside its tokens' output (states, weights) is not read without a cache.
    return (joined, *[None] * (len(first) - 1)) if isinstance(first, tuple) else joined


def _output(made: Any) -> torch.Tensor:
    return made[0] if isinstance(made, tuple) else made


# -- paged steps --------------------------------------------------------------------------------------------------
def recur_in_step(layer: Any, hidden_1TE: torch.Tensor, step: StepTokens) -> Any:
    """A layer's output for the flat tokens of a step; the rows' states are read from the step's store, and written."""
    states, number, outputs = step.states, layer.state_number, []
    if states is None:
        raise NotImplementedError("a step without states")
    for group in step.state_groups:
        held = {} if group.fresh else {
            (kind, place): states.store.read((number, kind, place), group.slots_B)
            for _, kind, place in states.store.keys_of(number)
        }  # fmt: skip
        cache = CallStates(held)
        hidden_BLE = hidden_1TE[0][group.token_BL]
        if held and hidden_BLE.shape[1] > 1 and not layer.can_continue:
            made = torch.cat([_output(_call(layer, token, cache)) for token in hidden_BLE.split(1, 1)], 1)
        else:
            made = _call(layer, hidden_BLE, cache)
        outputs.append((made, None))
        for (kind, place), value in cache.held.items():
            states.store.write((number, kind, place), group.slots_B, value)
    return _joined(outputs, step.state_order_T)


# -- packed passes ------------------------------------------------------------------------------------------------
def _packed(layer: Any, hidden_1TE: torch.Tensor, layout: PackedLayout) -> Any:
    plan, outputs = _plan_of(layout, layer.can_continue), []
    behind: dict[int, dict[tuple[str, int], torch.Tensor]] = {}  # states behind segments, by their number
    for group in plan.groups:
        states = None
        if group.parents is not None:
            names = behind[group.parents[0]]
            held = {name: torch.stack([behind[parent][name] for parent in group.parents]) for name in names}
            states = CallStates(held)
        elif group.has_children:
            states = CallStates()
        outputs.append((_call(layer, hidden_1TE[0][group.token_BL], states), group.output_N))
        if group.has_children and states is not None:
            parts = {name: value.unbind(0) for name, value in states.held.items()}
            for place, number in enumerate(group.numbers):
                behind[number] = {name: values[place] for name, values in parts.items()}
    return _joined(outputs, plan.order_T)


def _plan_of(layout: PackedLayout, can_continue: bool) -> SegmentPlan:
    if can_continue not in layout.segments:
        ends = None if layout.end_T is None else layout.end_T.cpu().numpy()
        layout.segments[can_continue] = segment_plan(
            layout.lengths.tolist(), ends, layout.device, can_continue=can_continue
        )
    return layout.segments[can_continue]


# -- sizes --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def state_bytes(model: torch.nn.Module) -> int:
    """Bytes of the states of one sequence in all layers. Computed on the meta device: no weight is read."""
    return sum(value.nbytes for layer in recurrent_layers(model) for value in _states_of(model, layer).values())


def _states_of(model: Any, layer: Any) -> Held:
    weights = {name: tensor.to("meta") for name, tensor in _tensors(layer)}
    dtype = next(model.parameters()).dtype
    hidden = torch.zeros(1, 2, model.config.get_text_config().hidden_size, dtype=dtype, device="meta")
    cache = CallStates()
    call: Callable[..., Any] = _Caller(layer)
    torch.func.functional_call(call, {f"layer.{name}": tensor for name, tensor in weights.items()}, (hidden, cache))
    return cache.held


def _tensors(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


class _Caller(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, cache: CallStates) -> Any:
        return _call(self.layer, hidden, cache)
