"""Which modules get adapters: names, lists, regular expressions, `all-linear`; and words for names that are wrong."""

from __future__ import annotations

import pytest
from peft.tuners.lora import LoraLayer

from posttrain.config.model import ModelConfig
from posttrain.models.adapter_targets import AdapterError, find_targets, stacked_note
from posttrain.models.lora import add_adapters
from tests.rollout.tiny import tiny

SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(kind: str, targets, exclude=None) -> set[str]:
    """Full names of the modules that have adapters."""
    config = ModelConfig(lora_rank=2, target_modules=targets, exclude_modules=exclude)
    module = add_adapters(tiny(kind), config)
    return {name for name, part in module.get_base_model().named_modules() if isinstance(part, LoraLayer)}


def every(*names: str) -> set[str]:
    homes = {name: "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn" for name in names}
    return {f"model.layers.{layer}.{home}.{name}" for name, home in homes.items() for layer in range(3)}


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        ("all-linear", None, every(*SEVEN)),
        (["q_proj", "v_proj"], None, every("q_proj", "v_proj")),
        ("q_proj", None, every("q_proj")),
        (r".*layers\.1\..*\.(q|down)_proj", None, {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}),
        (["layers.2.mlp.up_proj", "lm_head"], None, {"model.layers.2.mlp.up_proj", "lm_head"}),
        ("all-linear", ["gate_proj", "up_proj", "down_proj"], every("q_proj", "k_proj", "v_proj", "o_proj")),
        ("all-linear", r".*\.mlp\..*", every("q_proj", "k_proj", "v_proj", "o_proj")),
        (["q_proj"], r".*layers\.[01]\..*", {"model.layers.2.self_attn.q_proj"}),
    ],
)
def test_S4_68_exactly_the_modules_that_are_meant_have_adapters(targets, exclude, expected):
    assert adapted("qwen2", targets, exclude) == expected


def test_the_names_that_are_stored_are_short_where_short_ones_say_it_all():
    model = tiny("qwen3")
    assert set(find_targets(model, "all-linear")) == SEVEN
    assert find_targets(model, r".*\.0\..*q_proj") == ["model.layers.0.self_attn.q_proj"]


def test_the_linear_layers_of_gpt2_are_found_under_their_own_names():
    assert set(find_targets(tiny("gpt2"), "all-linear")) == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize(
    ("targets", "exclude", "words"),
    [
        (
            ["q_proj", "qq_proj"],
            None,
            r"no linear module .* is called qq_proj\. .*q_proj \(3\).*lm_head.*model\.layers\.0\.",
        ),
        ("nothing.*", None, r"nothing.*Linear modules of this model"),
        ("(q_proj", None, "no regular expression"),
        (["embed_tokens"], None, r"embed_tokens is of the kind Embedding; adapters stand beside linear modules only"),
        (["q_proj"], ["v_proj"], r"exclude_modules=\['v_proj'\]: v_proj is not among the modules that get adapters"),
        (["q_proj"], ["q_proj"], "leaves no module"),
    ],
)
def test_a_wrong_name_is_answered_with_the_names_that_there_are(targets, exclude, words):
    with pytest.raises(AdapterError, match=words):
        find_targets(tiny("qwen2"), targets, exclude)


def test_experts_that_lie_in_one_tensor_get_no_adapters_and_that_is_said():
    model, shape = tiny("qwen3-moe"), ModelConfig(lora_rank=2)
    assert adapted("qwen3-moe", "all-linear") == every("q_proj", "k_proj", "v_proj", "o_proj")
    names = "model.layers.N.mlp.experts.gate_up_proj, model.layers.N.mlp.experts.down_proj"
    stacked = sum(weight.numel() for name, weight in model.named_parameters() if "experts" in name)
    share = stacked / sum(weight.numel() for weight in model.parameters())
    before = stacked_note(model, shape, "model.target_modules")
    assert f"get no adapters. {names} ({share:.0%} of the base) stay as they are" in before
    assert before.startswith("model.target_modules=all-linear: ")
    assert stacked_note(add_adapters(model, shape), shape, "model.target_modules") == before
    with pytest.raises(AdapterError, match="gate_up_proj holds experts in one tensor; adapters stand beside linear"):
        find_targets(tiny("qwen3-moe"), ["q_proj", "gate_up_proj"])


@pytest.mark.parametrize("kind, shape", [("qwen2", {}), ("qwen3-moe", {"target_modules": ["q_proj"]})])
def test_nothing_is_said_of_experts_where_there_are_none_or_modules_were_named(kind, shape):
    assert stacked_note(tiny(kind), ModelConfig(lora_rank=2, **shape), "model.target_modules") is None
