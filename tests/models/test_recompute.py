"""Gradient checkpointing changes memory, never numbers: dropout of any kind stays off."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models.forward import recompute_layers

SHAPE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32}
SHAPE |= {"word_embed_proj_dim": 32, "d_model": 32, "num_layers": 3, "attention_heads": 2, "pad_token_id": 0}
DROPOUT = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5, "layerdrop": 0.0}
IDS = torch.arange(1, 13)[None]


def passes(model, *, recomputed: bool):
    """(gradients, elements that autograd kept) of one pass, in the mode that the engine computes in."""
    kept = 0

    def pack(x):
        nonlocal kept
        kept += x.numel()
        return x

    recompute_layers(model, recomputed)
    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=IDS, use_cache=False).logits.float().log_softmax(-1)[0, :, 7].sum()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}, kept


@pytest.mark.parametrize("kind", ["opt", "xglm", "biogpt"])  # their dropout is a function, not a module
def test_gradients_are_those_without_it_to_the_bit_and_less_is_kept(kind):
    settings = AutoConfig.for_model(kind)
    known = {name: value for name, value in {**SHAPE, **DROPOUT}.items() if hasattr(settings, name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(settings)(**known)).eval()
    plain, kept = passes(model, recomputed=False)
    again, kept_again = passes(model, recomputed=True)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept_again < 0.6 * kept
    assert passes(model, recomputed=False)[1] == kept  # taken back


def test_an_update_with_it_is_the_update_without_it(tmp_path):
    from posttrain.config.model import ModelConfig
    from posttrain.config.root import OptimConfig
    from posttrain.engine.base import EngineSettings
    from posttrain.engine.torch_engine import TorchEngine
    from posttrain.models.loading import load_causal_lm
    from posttrain.rollout.base import Output
    from posttrain.rollout.generate import to_batch

    config = AutoConfig.for_model("opt", **SHAPE, **DROPOUT, max_position_embeddings=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    responses = [Output(0, [4, 5, 6], [0.0] * 3, "stop"), Output(1, [9], [0.0], "stop")]
    batch, trained = to_batch([[1, 2, 3], [7, 8]], responses, 0), []
    for checkpointing in (False, True):
        model = load_causal_lm(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
        settings = EngineSettings(torch.device("cpu"), OptimConfig(lr=1e-2), gradient_checkpointing=checkpointing)
        TorchEngine(model, settings).update(batch, lambda data, out: -out["log_probs"].sum())
        trained.append({name: weight.detach() for name, weight in model.named_parameters()})
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
