"""Runs of a small mixture of experts: routes are recorded, replayed, measured, and saved with batches that wait."""

from pathlib import Path

import numpy as np
import pytest
import torch
from runs import metrics_of, run
from test_dynamic_sampling import FILTERED, rarely_right, weights_equal

from posttrain.batch.fields import ROUTES
from posttrain.config.resolved import ConfigError
from posttrain.errors import UserError
from posttrain.models.embedded import byte_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.policy import PolicyWorker

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "moe_intermediate_size": 32}
SHAPE |= {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.2}
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
R3, R2 = ({f"{ACTOR}router_replay__mode": mode} for mode in ("R3", "R2"))
RECORDED = {f"{ROLLOUT}enable_rollout_routing_replay": True}
# The rollout rounds to fp8, so that its routes differ from the trainer's.
ROUNDED = {f"{ROLLOUT}quantization": "fp8", "trainer__rollout_mismatch_tol": 1.0}
TWO_UPDATES = {f"{ACTOR}ppo_mini_batch_size": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("mixture"), byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tokenizer), **ends, **SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_replay_of_the_rollouts_routes_brings_its_log_probs_near_the_trainers(mixture, sums, tmp_path):
    """With fp8 in the rollout some routes differ. Measured without replay, and gone from the log-probs with it."""
    found = {}
    for name, more in {"measured": RECORDED, "replayed": R3}.items():
        result = run(mixture, sums, tmp_path / name, trainer__total_training_steps=1, **more, **ROUNDED)
        (found[name],) = metrics_of(result.path)
    measured, replayed = found["measured"], found["replayed"]
    assert 0.01 < measured["actor/route_changes"] < 0.5
    assert measured["actor/route_changes"] == pytest.approx(replayed["actor/route_changes"], rel=0.3)
    assert replayed["mismatch/k3_kl"] < 0.5 * measured["mismatch/k3_kl"]
    for line in (measured, replayed):
        assert 1 < line["actor/expert_load_max"] < 8 and 0 < line["actor/router_entropy"] < np.log(8)


def test_routes_of_the_old_log_probs_are_taken_in_all_updates(mixture, sums, tmp_path, monkeypatch):
    """R2, with two updates that move the routers: the second sees routes of the first one's weights."""
    made = []
    plain = PolicyWorker.compute_log_prob
    monkeypatch.setattr(
        PolicyWorker, "compute_log_prob", lambda self, *given: made.append(plain(self, *given)) or made[-1]
    )
    more = {**TWO_UPDATES, f"{ACTOR}optim__lr": 0.1, "trainer__total_training_steps": 1}
    (line,) = metrics_of(run(mixture, sums, tmp_path / "R2", **more, **R2).path)
    routes = made[-1].non_tensor_batch[ROUTES]
    assert len(routes) == 12 and {array.shape[1:] for array in routes} == {(2, 2)}
    assert line["actor/route_changes"] == 0  # of the first update, whose weights are those of the old log-probs
    (other,) = metrics_of(run(mixture, sums, tmp_path / "disabled", **more).path)
    assert abs(line["policy_loss"] - other["policy_loss"]) > 1e-4 and "actor/route_changes" not in other


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_with_the_routes_of_a_surplus(mixture, sums, tmp_path):
    settings = {**FILTERED, **R3, **ROUNDED, f"{ACTOR}router_aux_loss_coef": 0.01}
    straight = run(mixture, sums, tmp_path / "straight", reward=rarely_right, **settings)
    halves = {**settings, "trainer__total_training_steps": 2}
    run(mixture, sums, tmp_path / "halves", reward=rarely_right, **halves)
    surplus = tmp_path / "halves" / "test" / "run" / "checkpoints" / "global_step_2" / "surplus"
    saved = DataProto.load_from_disk(surplus)
    lengths = (saved.batch["attention_mask"].sum(-1) - 1).tolist()
    assert [array.shape for array in saved.non_tensor_batch[ROUTES]] == [(length, 2, 2) for length in lengths]
    assert {array.dtype for array in saved.non_tensor_batch[ROUTES]} == {np.dtype(np.uint8)}
    resumed = run(mixture, sums, tmp_path / "halves", reward=rarely_right, **settings)
    assert metrics_of(resumed.path) == metrics_of(straight.path)
    assert weights_equal(straight.path, resumed.path)


REJECTED = {
    "hf": ({**R3, f"{ROLLOUT}name": "hf"}, "not built for actor_rollout_ref.rollout.name=hf"),
    "megatron": ({**R3, f"{ACTOR}strategy": "megatron"}, "not built for actor_rollout_ref.actor.strategy=megatron"),
    "not recorded": ({**R3, f"{ROLLOUT}enable_rollout_routing_replay": False}, "does not record them"),
    "both": ({**R2, **RECORDED}, "records the rollout's"),
    "no load": ({f"{ACTOR}router_aux_loss_coef": 0.1}, "needs the load of the experts"),
    "no pass": ({**R2, f"{ACTOR}old_log_probs": "rollout"}, "which the trainer does not compute"),
}


@pytest.mark.parametrize(("more", "said"), REJECTED.values(), ids=REJECTED)
def test_what_is_not_built_is_rejected_before_a_model_is_loaded(more, said, mixture, sums, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run(mixture, sums, tmp_path, **more)


@pytest.mark.parametrize("more", [R2, R3], ids=["R2", "R3"])
def test_a_dense_model_has_no_routes(more, tiny_model, sums, tmp_path):
    with pytest.raises(UserError, match=r"the model \(qwen2\) has no routers that are known here"):
        run(tiny_model, sums, tmp_path, **more)
