"""Which modules get adapters: names, lists, regular expressions, `all-linear`; and words for names that are wrong."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer

from posttrain.config.model import ModelConfig
from posttrain.models.adapter_targets import AdapterError, describe_stacked, find_targets, stacked_note
from posttrain.models.lora import add_adapters, merged_state
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
def test_exactly_the_modules_that_are_meant_have_adapters(targets, exclude, expected):
    assert adapted("qwen2", targets, exclude) == expected


def test_the_names_that_are_stored_are_short_where_short_ones_say_it_all():
    model = tiny("qwen3")
    assert set(find_targets(model, "all-linear").modules) == SEVEN
    assert find_targets(model, r".*\.0\..*q_proj").modules == ["model.layers.0.self_attn.q_proj"]


def test_the_linear_layers_of_gpt2_are_found_under_their_own_names():
    assert set(find_targets(tiny("gpt2"), "all-linear").modules) == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [("mamba", {"dt_proj", "out_proj"}), ("mamba2", {"out_proj"}), ("falcon-h1", {"out_proj"}), ("lfm2", set())],
)
def test_weights_that_recurrent_layers_read_themselves_get_no_adapters(kind, left_out):
    linear = {name.rpartition(".")[2] for name, part in tiny(kind).named_modules() if type(part) is torch.nn.Linear}
    assert {name.rpartition(".")[2] for name in adapted(kind, "all-linear")} == linear - left_out - {"lm_head"}
    for name in left_out:
        with pytest.raises(AdapterError, match=rf"target_modules=\['{name}'\]: {name} gets no adapter in models of"):
            adapted(kind, [name])


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon-h1", "lfm2", "qwen3-next", "qwen3.5"])
def test_every_adapter_of_a_recurrent_model_has_a_gradient(kind):
    module = add_adapters(tiny(kind), ModelConfig(lora_rank=2, target_modules="all-linear"))
    module(torch.arange(1, 12)[None], use_cache=False).logits.square().sum().backward()
    trained = {name: weight.grad for name, weight in module.named_parameters() if "lora_B" in name}
    assert trained
    assert not [name for name, gradient in trained.items() if gradient is None or not gradient.any()]


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
        (["embed_tokens"], None, r"embed_tokens is of the kind Embedding; adapters stand beside linear modules and"),
        (["q_proj"], ["v_proj"], r"exclude_modules=\['v_proj'\]: v_proj is not among the modules that get adapters"),
        (["q_proj"], ["q_proj"], "leaves no module"),
    ],
)
def test_a_wrong_name_is_answered_with_the_names_that_there_are(targets, exclude, words):
    with pytest.raises(AdapterError, match=words):
        find_targets(tiny("qwen2"), targets, exclude)


def test_all_linear_leaves_experts_that_lie_in_one_tensor_and_says_how_to_name_them():
    model, shape = tiny("qwen3-moe"), ModelConfig(lora_rank=2)
    assert adapted("qwen3-moe", "all-linear") == every("q_proj", "k_proj", "v_proj", "o_proj")
    names = "model.layers.N.mlp.experts.gate_up_proj, model.layers.N.mlp.experts.down_proj"
    stacked = sum(weight.numel() for name, weight in model.named_parameters() if "experts" in name)
    share = stacked / sum(weight.numel() for weight in model.parameters())
    before = stacked_note(describe_stacked(model), shape, "model.target_modules")
    assert f"get no adapters. {names} ({share:.0%} of the base) stay as they are" in before
    assert before.startswith("model.target_modules=all-linear: ")
    assert "model.target_modules=[all-linear,experts] gives adapters to the experts as well" in before
    assert stacked_note(describe_stacked(add_adapters(model, shape)), shape, "model.target_modules") == before


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_layers_beside_stacked_experts_get_no_adapters_of_the_experts(kind):
    model, shape = mixture(kind), ModelConfig(lora_rank=2)
    before = stacked_note(describe_stacked(model), shape, "model.target_modules")
    assert before is not None and "and gate_proj, up_proj, down_proj of other layers" in before
    with pytest.raises(AdapterError, match=rf"type {kind} peft puts .* leave out gate_proj"):
        find_targets(model, ["o_proj", "gate_proj", "down_proj"])
    whole = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapted = add_adapters(model, shape)
    assert stacked_note(describe_stacked(adapted), shape, "model.target_modules") == before
    for name, weight in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.ones_(weight)
    merged = merged_state(adapted)
    assert merged.keys() == whole.keys()
    changed = {name.rpartition("self_attn.")[2] for name in whole if not torch.equal(merged[name], whole[name])}
    assert "o_proj.weight" in changed and all("proj" in name and "mlp" not in name for name in changed)


def mixture(kind: str) -> torch.nn.Module:
    """Two layers, of which the second has experts, and one that all tokens go through."""
    import transformers as hf

    shape = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8, "n_routed_experts": 4}
    shape |= {
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    if kind == "glm4_moe":
        return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**shape, head_dim=8))
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**shape, **latent))


@pytest.mark.parametrize("kind, shape", [("qwen2", {}), ("qwen3-moe", {"target_modules": ["q_proj"]})])
def test_nothing_is_said_of_experts_where_there_are_none_or_modules_were_named(kind, shape):
    assert stacked_note(describe_stacked(tiny(kind)), ModelConfig(lora_rank=2, **shape), "model.target_modules") is None


def test_weights_that_4_bits_leave_out_are_named():
    from posttrain.engine.facts import facts_of
    from posttrain.workers.roles import adapter_notes

    shape = ModelConfig(lora_rank=2, quantization="nf4", target_modules=["q_proj"])
    notes = adapter_notes(facts_of(tiny("qwen3-moe"), packed=True), shape)
    assert len(notes) == 1 and "experts.down_proj (" in notes[0] and "of the base) keep model.dtype" in notes[0]
    assert adapter_notes(facts_of(tiny("qwen2"), packed=True), shape) == []


def test_a_head_of_several_layers_is_trained_whole_and_stored_as_peft_stores_it(tmp_path):
    from peft import PeftModel
    from transformers import RobertaConfig, RobertaForSequenceClassification

    from posttrain.config.model import SCORE_HEADS
    from posttrain.models.adapter_files import adapter_settings, trained_parameters, write_adapter

    size = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = RobertaConfig(**size, num_attention_heads=2, num_labels=1, pad_token_id=1)
    torch.manual_seed(0)
    base = RobertaForSequenceClassification(config).eval()
    base.save_pretrained(tmp_path / "base")
    model = add_adapters(base, ModelConfig(lora_rank=2), whole=SCORE_HEADS, role="")
    layers = {name for name, part in model.get_base_model().named_modules() if isinstance(part, LoraLayer)}
    assert layers and not any(name.startswith("classifier") for name in layers)
    for weight in trained_parameters(model).values():
        weight.data.normal_(0, 0.2)
    write_adapter(tmp_path / "adapter", trained_parameters(model), adapter_settings(model, "base"))
    other = RobertaForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    ids = torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(other, str(tmp_path / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)
    assert float(expected.abs()) > 1e-3
