"""Router replay: experts recorded by one pass are taken by another, whatever packs, shares or splits its rows."""

import copy
import types

import numpy as np
import pytest
import torch
from engine_tools import gradient, objective

from posttrain.batch.fields import ROUTES
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.errors import UserError
from posttrain.models.forward import ForwardMode
from posttrain.models.routing import RoutePass, check_routes, route_shape, routed, routers_of, watch_routers
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate, to_batch
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import MIXTURES, tiny

PROMPTS = [list(range(3, 3 + length)) for length in (5, 5, 5, 40, 40, 9)]
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip


def model(kind="qwen3-moe", dtype=torch.float32, seed=0):
    if kind == "deepseek_v3":
        module = tiny("llama", dtype, seed=seed, model_type="deepseek_v3", **LATENT)
    elif kind == "glm4_moe":
        sizes = {name: LATENT[name] for name in LATENT if name[0] != "q" and name not in ("kv_lora_rank", "v_head_dim")}
        module = tiny("llama", dtype, seed=seed, model_type="glm4_moe", head_dim=8, **sizes)
    else:
        module = tiny(kind, dtype, seed=seed)
    if dtype is torch.float64:  # grouped products have no such type
        module.set_experts_implementation("eager")
    module.forward_mode = ForwardMode(packed=True, padded=True)
    return module


def engine(module, **settings):
    defaults = {"device": torch.device("cpu"), "optim": OptimConfig(lr=1e-3), "grad_clip": 1e9}
    return TorchEngine(module, EngineSettings(**{**defaults, **settings}))


def sampled(module, *, tokens=12, seeds=range(6), **settings):
    """A batch of responses with the routes that the rollout recorded."""
    rollout = build_native(
        module, RolloutConfig(kv_cache_gb=0.05, enable_rollout_routing_replay=True, **settings), decode=None
    )[0]
    lengths = [Sampling(max_tokens=tokens - row) for row in range(len(PROMPTS))]
    batch = to_batch(PROMPTS, generate(rollout, PROMPTS, lengths, seeds), pad_token_id=0)
    batch.non_tensor_batch["uid"] = np.array(["a", "a", "a", "b", "b", "c"], dtype=object)
    rng, mask = np.random.default_rng(1), batch.batch["response_mask"]
    for name in ("advantages", "old_log_probs", "ref_log_prob"):
        batch.batch[name] = torch.from_numpy(rng.normal(-1, 1, mask.shape)) * mask
    return batch


def routes_of(trainer, batch):
    """What the trainer itself would choose."""
    recording = engine(trainer, optim=None, record_routes=True)
    recording.log_probs(batch.select(None, ["uid"]))
    return recording.take_routes()


def as_sets(routes):
    return np.sort(np.concatenate(list(routes)).astype(int), -1)


@pytest.mark.parametrize("kind", [*sorted(MIXTURES), "deepseek_v3", "glm4_moe"])
def test_at_equal_weights_the_trainer_chooses_what_the_rollout_recorded(kind):
    """In float32, prompts included, by the fused and by the general decoder; (tokens, layers, top_k) as uint8."""
    module = model(kind)
    batch, shape = sampled(module), route_shape(module)
    recorded = batch.non_tensor_batch[ROUTES]
    lengths = (batch.batch["attention_mask"].sum(-1) - 1).tolist()
    assert [routes.shape for routes in recorded] == [(length, shape.layers, shape.top_k) for length in lengths]
    assert {routes.dtype for routes in recorded} == {np.dtype(np.uint8)}
    assert (as_sets(recorded) != as_sets(routes_of(module, batch))).sum() == 0
    assert len(np.unique(as_sets(recorded))) > 2


def test_replay_of_the_own_choice_is_bitwise_nothing_and_of_another_one_takes_it():
    batch, other = sampled(model()), model(seed=1)
    plain = engine(other, optim=None).log_probs(batch, temperature=0.7)["log_probs"]
    own = copy.copy(batch).select()
    own.non_tensor_batch[ROUTES] = np.array([*routes_of(other, batch), None], dtype=object)[:-1]
    replaying = engine(other, optim=None, replay_routes=True)
    assert torch.equal(replaying.log_probs(own, temperature=0.7)["log_probs"], plain)
    differing = (as_sets(batch.non_tensor_batch[ROUTES]) != as_sets(own.non_tensor_batch[ROUTES])).mean()
    assert differing > 0.3  # weights of another seed choose other experts
    forced = replaying.log_probs(batch, temperature=0.7)["log_probs"]
    torch.testing.assert_close(forced.double(), reference(other, batch)[0].detach(), rtol=0, atol=1e-5)
    assert (forced - plain).abs().max() > 0.01


def reference(module, batch):
    """(log-probs, entropies) of rows one by one, in plain float64, every token through its recorded experts."""
    twin = tiny("qwen3-moe", torch.float64, attention="sdpa")  # `eager` takes its softmax in float32
    for norm in (module for module in twin.modules() if type(module).__name__ == "Qwen3MoeRMSNorm"):
        norm.forward = types.MethodType(plain_norm, norm)  # transformers' would compute in float32
    twin.load_state_dict({name: weight.double() for name, weight in module.state_dict().items()})
    logp_rows, entropy_rows, width = [], [], batch.batch["responses"].shape[1]
    for ids, mask, routes in zip(
        batch.batch["input_ids"], batch.batch["attention_mask"].bool(), batch.non_tensor_batch[ROUTES], strict=True
    ):
        for number, layer in enumerate(twin.model.layers):
            layer.mlp.forward = lambda x, block=layer.mlp, own=routes[:, number]: mixed(block, x[0], own)[None]
        tokens, length = ids[mask], int(mask[-width:].sum())
        logp = (twin(tokens[None]).logits[0] / 0.7).log_softmax(-1)[-length - 1 : -1]
        fill = (0, width - length)
        logp_rows.append(torch.nn.functional.pad(logp.gather(1, tokens[-length:, None])[:, 0], fill))
        entropy_rows.append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), fill))
    reference.model = twin
    return torch.stack(logp_rows), torch.stack(entropy_rows)


def plain_norm(self, x):
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def mixed(block, x_TE, routes_TK):
    """The experts of each token, one token at a time; the last token has no routes, and nothing is read from it."""
    p_TX = (x_TE @ block.gate.weight.T).softmax(-1)
    out = []
    for token, x_E in enumerate(x_TE):
        row = torch.zeros_like(x_E)
        chosen = routes_TK[token].tolist() if token < len(routes_TK) else []
        whole = p_TX[token, chosen].sum() if block.gate.norm_topk_prob else 1
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ x_E).chunk(2)
            share = p_TX[token, expert] / whole
            row = row + share * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        out.append(row)
    return torch.stack(out)


LAYOUTS = {
    "shared prompts": {},
    "apart": {"share_prompts": False},
    "three passes": {"token_budget": 60},
    "one row each": {"max_rows": 1},
    "padded": {"pack": False},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def recorded():
    """(a float64 model, a batch with the routes of other weights, the reference's gradient)"""
    batch, module = sampled(model(dtype=torch.float64, seed=1)), model(dtype=torch.float64)
    outputs = reference(module, batch)
    loss = weighted(batch, {"log_probs": outputs[0], "entropy": outputs[1]})
    parts = torch.autograd.grad(loss, list(reference.model.parameters()))
    return module, batch, torch.cat([part.flatten() for part in parts])


def weighted(micro, outputs):
    """A loss in which every token counts differently."""
    return (outputs["log_probs"] * micro.batch["advantages"] + 0.3 * outputs["entropy"]).sum()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_under_forced_routes_are_the_references_however_rows_are_packed(recorded, layout):
    module, batch, expected = recorded
    trained = engine(copy.deepcopy(module), replay_routes=True, **layout)
    assert trained.runner.gradients(batch, weighted, 0.7)
    found = torch.cat([master.grad.flatten() for master in trained.optimizer.masters])
    assert float((found - expected).abs().max()) < 1e-10
    loss = objective()
    gradient(trained, batch, loss)
    metrics = loss.metrics()
    assert metrics["actor/route_changes"] > 0.3 and 0 < metrics["actor/router_entropy"] < np.log(4)


def test_without_replay_the_gradient_is_another_and_changes_are_counted(recorded):
    module, batch, expected = recorded
    loss, free = objective(), engine(copy.deepcopy(module))
    gradient(free, batch, loss)
    free.optimizer.adam.zero_grad(set_to_none=True)
    free.runner.gradients(batch, weighted, 0.7)
    found = torch.cat([master.grad.flatten() for master in free.optimizer.masters])
    assert float((found - expected).abs().max()) > 1e-2
    own = routes_of(copy.deepcopy(module), batch)
    width = batch.batch["responses"].shape[1]
    prompts = batch.batch["attention_mask"][:, :-width].sum(-1).tolist()
    differs = [
        (np.sort(mine[start - 1 :]) != np.sort(theirs[start - 1 :])).any(-1)
        for mine, theirs, start in zip(own, batch.non_tensor_batch[ROUTES], prompts, strict=True)
    ]
    assert loss.metrics()["actor/route_changes"] == pytest.approx(np.concatenate(differs).mean(), abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_load_balance_loss_does_not_depend_on_how_rows_are_split(recorded, layout):
    """Its gradient alone: shares of experts are those of the recorded routes of the whole mini-batch."""
    module, batch, *_ = recorded
    found = []
    for coefficient in (0.0, 2.0):
        trained = engine(copy.deepcopy(module), replay_routes=True, balance_load=coefficient > 0, **layout)
        if coefficient:
            trained.stage.load_LX = trained._recorded_load(batch, trained.stage.routes)
        loss = objective(router_aux_loss_coef=coefficient)
        found.append(gradient(trained, batch, loss))
    names = [name for name, weight in module.named_parameters() for _ in range(weight.numel())]
    own = (found[1] - found[0]) / 2.0
    assert float(own[[".gate.weight" in name for name in names]].abs().max()) > 1e-3
    expected = balance_gradient(module, batch)
    assert float((own - expected).abs().max()) < 1e-8  # the weights of tokens are float32


def balance_gradient(module, batch):
    """Of experts x share of choices x mean probability, summed over experts and averaged over layers, by hand."""
    twin = copy.deepcopy(module)
    trained = engine(twin, replay_routes=True, share_prompts=False)
    seen = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, number=number: seen.update({number: out[0]}))
        for number, layer in enumerate(twin.model.layers)
    ]
    (units,), recorded = trained.runner.plan(batch), batch.non_tensor_batch[ROUTES]
    rows = trained.runner.pack(batch[[row for unit in units for row in unit.rows]], units)
    with trained.stage.computing(rows):
        trained.stage.forward(rows, None, 0.7)
    for hook in hooks:
        hook.remove()
    total = 0.0
    prompts = batch.batch["attention_mask"][:, : -batch.batch["responses"].shape[1]].sum(-1).tolist()
    for number, logits_TX in seen.items():
        chosen = np.concatenate([routes[start - 1 :, number] for routes, start in zip(recorded, prompts, strict=True)])
        share_X = torch.from_numpy(np.bincount(chosen.ravel(), minlength=4) / chosen.size)
        p_TX = logits_TX.softmax(-1)[rows.predict_U]
        total = total + 4 * (share_X * p_TX.mean(0)).sum() / len(seen)
    parts = torch.autograd.grad(total, list(twin.parameters()), allow_unused=True)
    given = zip(parts, twin.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(w) if part is None else part).flatten() for part, w in given])


def test_an_update_tells_the_load_of_the_experts_and_records_no_routes_it_was_not_asked_for(recorded):
    module, batch, *_ = recorded
    loads = []
    for layout in LAYOUTS.values():
        loss, trained = objective(), engine(copy.deepcopy(module), replay_routes=True, **layout)
        loads.append(trained.update(loss.prepare(copy.copy(batch).select()), loss)["expert_load_max"])
    assert max(loads) - min(loads) < 1e-6 and 1 < loads[0] < 4
    dense = engine(model("qwen2"))
    loss = objective()
    assert "expert_load_max" not in dense.update(loss.prepare(copy.copy(batch).select(None, ["uid"])), loss)


def test_a_dense_model_is_rejected_by_the_setting_that_needs_routes():
    with pytest.raises(UserError, match=r"SETTING: the model \(qwen2\) has no routers .* qwen3_moe"):
        check_routes(model("qwen2"), "SETTING")
    with pytest.raises(UserError, match="enable_rollout_routing_replay=True: the model"):
        sampled(model("qwen2"))


@torch.no_grad()
def test_experts_beyond_the_best_groups_are_rejected_where_they_have_no_weight():
    """A token gets three experts, and its best group has two: transformers adds another, in DeepSeek-V2 for nothing."""
    few = {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("deepseek-v2", "deepseek-v3"):
        module = tiny(kind, **few)
        router = routers_of(module)[0]
        _, share, chosen = type(router).forward(router, hidden)
        assert all(len(set(row)) == 3 for row in chosen.tolist())
        assert (share == 0).sum(-1).tolist() == [int(kind == "deepseek-v2")] * 9
    with pytest.raises(
        UserError, match=r"SETTING: .*deepseek_v2.* to 3 experts, and its best groups .topk_group. have"
    ):
        check_routes(tiny("deepseek-v2", **few), "SETTING")
    assert check_routes(module, "SETTING").top_k == 3
    watch_routers(module)
    replay = RoutePass(chosen[:, None], torch.ones(9, dtype=torch.bool), replays=True)
    with routed(replay):
        torch.testing.assert_close(router(hidden)[1], share)
