"""Document 0, parts 3 and 4: the stages of a step, called one by one on a trainer built as a program would."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from seen import parity_reward, settings

from posttrain.algorithms import AdvantageEstimator
from posttrain.config import load_config
from posttrain.data.dataset import PromptDataset
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.pool import RewardPool
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.ppo.first_batch import GroupError, check_groups
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from posttrain.trainer.ppo.reward import RewardManager

MODEL = "actor_rollout_ref.model"


@pytest.fixture
def trainer(tiny_model, parquet, tmp_path):
    """A trainer of 4 prompts x 3 responses and 2 mini-batches, built as a program would; no step is made."""
    more = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "actor_rollout_ref__actor__use_kl_loss": True}
    config = load_config(settings(tiny_model, parquet, tmp_path, **more)).config
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    spec = resolve_reward(config.custom_reward_function, function=parity_reward)
    pool = RewardPool(spec, num_workers=1, timeout_s=10, failure_score=0.0)
    with RunDirectory(tmp_path, "p", "e") as run, pool:
        yield RayPPOTrainer(
            config,
            tokenizer=tokenizer,
            run=run,
            train_dataset=PromptDataset(str(parquet["train"]), tokenizer, config.data),
            val_dataset=None,
            reward_fn=RewardManager(pool, tokenizer),
            device=torch.device("cpu"),
        )


@pytest.fixture
def generated(trainer) -> DataProto:
    return trainer._generate(trainer._next_prompts())


@pytest.fixture
def ready(trainer, generated) -> DataProto:
    """A batch up to the advantages."""
    batch = trainer._score(generated)
    batch.union(trainer.actor_rollout_wg.compute_log_prob(batch))
    batch.union(trainer.actor_rollout_wg.compute_ref_log_prob(batch))
    return compute_advantage(batch, AdvantageEstimator.GRPO)


def weights(trainer) -> torch.Tensor:
    module = trainer.actor_rollout_wg.worker.engine.module
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def test_a_constructed_trainer_has_made_no_step_and_fit_makes_the_configured_ones(trainer):
    worker = trainer.actor_rollout_wg.worker
    assert (trainer.step, worker.engine.optimizer.steps_done, trainer.recorder.history) == (0, 0, [])
    result = trainer.fit()
    assert (result.status, result.steps, len(result.metrics)) == ("finished", 2, 2)
    assert worker.engine.optimizer.steps_done == 4


def test_the_generation_batch_has_the_prompts_fields_and_the_rest_stays(trainer):
    batch = trainer._next_prompts()
    order = list(batch.non_tensor_batch["uid"])
    prompts = trainer._get_gen_batch(batch)
    assert isinstance(prompts, DataProto) and len(prompts) == len(batch) == 4
    assert set(prompts.batch) == {"prompts", "attention_mask", "position_ids"}
    assert set(prompts.non_tensor_batch) == {"raw_prompt_ids"}
    assert not set(prompts.batch) & set(batch.batch) and "raw_prompt_ids" not in batch.non_tensor_batch
    assert list(batch.non_tensor_batch["uid"]) == order == ["0", "1", "2", "3"]
    assert {"ground_truth", "data_source", "extra_info"} <= set(batch.non_tensor_batch)


def test_generation_gives_batch_times_n_rows_in_the_order_of_its_input(trainer):
    rows = trainer._get_gen_batch(trainer._next_prompts()).repeat(repeat_times=3, interleave=True)
    rows.non_tensor_batch["seed"] = np.arange(12, dtype=object)
    out = trainer.actor_rollout_wg.generate_sequences(rows)
    assert isinstance(out, DataProto) and len(out) == 12 and out.batch["responses"].shape == (12, 6)
    assert torch.equal(out.batch["prompts"], rows.batch["prompts"])
    again = trainer.actor_rollout_wg.generate_sequences(rows[[5, 0]])
    assert torch.equal(again.batch["responses"], out.batch["responses"][[5, 0]])


def test_the_reward_function_puts_each_score_on_the_last_response_token(trainer, generated):
    trainer.experience.wait_for_scores(generated)  # while they were generated
    scores = trainer.reward_fn(generated)
    texts = trainer.tokenizer.batch_decode(generated.batch["responses"], skip_special_tokens=True)
    assert scores.shape == generated.batch["responses"].shape
    last = generated.batch["response_mask"].sum(-1) - 1
    for row, text in enumerate(texts):
        assert scores[row, last[row]] == pytest.approx(parity_reward("", text, ""))
        assert scores[row].count_nonzero() <= 1


def test_compute_advantage_takes_enum_and_string_on_a_hand_made_batch():
    def made() -> DataProto:
        rewards = torch.zeros(5, 3)
        rewards[0, 2] = 1.0
        return DataProto.from_dict(
            tensors={"token_level_rewards": rewards, "response_mask": torch.tensor([[1, 1, 1]] * 4 + [[1, 0, 0]])},
            non_tensors={"uid": np.array(["a"] * 5, dtype=object)},
        )

    data = made()
    given = compute_advantage(data, adv_estimator=AdvantageEstimator.GRPO)
    assert given is data and {"advantages", "returns"} <= set(data.batch)
    assert data.batch["advantages"][0].tolist() == pytest.approx([1.78885] * 3, abs=1e-5)
    assert data.batch["advantages"][4].tolist() == pytest.approx([-0.44721, 0, 0], abs=1e-5)
    by_name = compute_advantage(made(), adv_estimator="grpo").batch
    assert torch.equal(by_name["advantages"], data.batch["advantages"])
    assert torch.equal(by_name["returns"], data.batch["returns"])


def test_update_actor_changes_the_weights_and_gives_its_metrics(trainer, ready):
    before = weights(trainer)
    metrics = trainer.actor_rollout_wg.update_actor(ready)
    assert {"policy_loss", "kl_loss", "actor/grad_norm", "actor/lr"} <= set(metrics)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] == 1e-3
    assert (weights(trainer) - before).abs().max() > 1e-4


def test_log_probs_equal_a_plain_forward_pass_under_both_names(trainer, generated):
    worker = trainer.actor_rollout_wg
    ours = worker.compute_log_probs(generated).batch
    assert torch.equal(ours["old_log_probs"], worker.compute_log_prob(generated).batch["old_log_probs"])
    ids, mask = generated.batch["input_ids"], generated.batch["attention_mask"]
    with torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = worker.worker.engine.module(input_ids=ids, attention_mask=mask, position_ids=places).logits
    width = generated.batch["responses"].shape[1]
    plain = logits.log_softmax(-1)[:, -width - 1 : -1].gather(-1, ids[:, -width:, None])[..., 0]
    real = generated.batch["response_mask"].bool()
    assert (plain - ours["old_log_probs"])[real].abs().max() < 1e-5


def test_to_S0_134_one_batch_goes_through_the_stages_and_each_only_adds_to_it(trainer):
    prompts = trainer._next_prompts()
    batch = trainer._generate(prompts)
    fields = {"prompts", "responses", "input_ids", "attention_mask", "response_mask"}
    assert fields <= set(batch.batch)
    tensors = batch.batch
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], -1))
    assert Counter(batch.non_tensor_batch["uid"]) == {str(serial): 3 for serial in range(4)}
    kept = {name: tensors[name].clone() for name in tensors}
    for stage, added in (
        (trainer._score, {"token_level_scores", "token_level_rewards"}),
        (lambda b: b.union(trainer.actor_rollout_wg.compute_log_prob(b)), {"old_log_probs", "entropy"}),
        (lambda b: b.union(trainer.actor_rollout_wg.compute_ref_log_prob(b)), {"ref_log_prob"}),
        (lambda b: compute_advantage(b, "grpo"), {"advantages", "returns"}),
    ):
        assert stage(batch) is batch
        assert set(tensors) == set(kept) | added
        assert all(torch.equal(tensors[name], value) for name, value in kept.items())
        kept = {name: tensors[name].clone() for name in tensors}
    trainer.actor_rollout_wg.update_actor(batch)
    assert all(torch.equal(tensors[name], value) for name, value in kept.items())
    rewards = batch.non_tensor_batch["reward_score"].astype(float)
    assert tensors["token_level_rewards"].sum(-1).tolist() == pytest.approx(list(rewards))
    assert torch.equal(tensors["log_probs"], tensors["old_log_probs"])
    assert torch.equal(tensors["ref_log_probs"], tensors["ref_log_prob"])
    assert (tensors["advantages"] * (1 - tensors["response_mask"])).abs().max() == 0
    assert batch.non_tensor_batch["prompt"][0].endswith("= ?<|end|><|assistant|>")
    for row, text in enumerate(batch.non_tensor_batch["response"]):
        ids = tensors["responses"][row][tensors["response_mask"][row].bool()]
        assert text == trainer.tokenizer.decode(ids, skip_special_tokens=True)


def test_passes_outside_mini_batches_inside_and_no_gradient_is_left(trainer, ready, monkeypatch):
    actor, engine = trainer.actor_rollout_wg.worker.actor, trainer.actor_rollout_wg.worker.engine
    seen, plain = [], engine.update

    def update(mini, *args, **named):
        assert all(weight.grad is None or weight.grad.abs().max() == 0 for weight in engine.module.parameters())
        seen.append(sorted(set(mini.non_tensor_batch["uid"])))
        return plain(mini, *args, **named)

    monkeypatch.setattr(engine, "update", update)
    monkeypatch.setattr(actor.config.actor_rollout_ref.actor, "ppo_epochs", 2)
    metrics = actor.update_policy(ready)
    assert seen == [["0", "1"], ["2", "3"]] * 2
    assert metrics["actor/optimizer_steps"] == 4 and engine.optimizer.steps_done == 4
    assert all(weight.grad is None or weight.grad.abs().max() == 0 for weight in engine.module.parameters())


def test_on_policy_the_ratio_is_one_at_the_first_mini_batch(grpo):
    assert all(line["actor/ratio_deviation"] < 1e-5 for line in grpo.steps)


def test_the_first_batch_must_hold_whole_groups_of_one_prompt(generated):
    check_groups(generated, 3)
    with pytest.raises(GroupError, match=r"uid '3' has 2 rows instead of 3 \(actor_rollout_ref.rollout.n\)"):
        check_groups(generated[list(range(11))], 3)
    uids = generated.non_tensor_batch["uid"]
    uids[2], uids[3] = uids[3], uids[2]
    with pytest.raises(GroupError, match=r"uid '0' holds responses to different prompts"):
        check_groups(generated, 3)


def test_a_run_whose_groups_are_mixed_stops_at_its_first_batch(trainer, monkeypatch):
    plain = trainer._generate

    def mixed(batch):
        out = plain(batch)
        out.non_tensor_batch["uid"] = np.roll(out.non_tensor_batch["uid"], 1)
        return out

    monkeypatch.setattr(trainer, "_generate", mixed)
    with pytest.raises(GroupError, match="different prompts"):
        trainer.fit()


# -- settings of the stages


def test_the_kl_in_the_reward_is_of_the_kind_that_is_set(trainer, ready, monkeypatch):
    fields = ready.batch
    fields["old_log_probs"] = fields["old_log_probs"] + torch.linspace(-1, 2, fields["old_log_probs"].numel()).view_as(
        fields["old_log_probs"]
    )
    gap = (fields["old_log_probs"] - fields["ref_log_prob"]) * fields["response_mask"]
    formulas = {"kl": gap, "abs": gap.abs(), "mse": gap**2 / 2, "low_var_kl": (-gap).exp() + gap - 1}
    monkeypatch.setattr(trainer.config.algorithm, "use_kl_in_reward", True)
    trainer.kl_controller.value = 0.5
    for kind, kl in formulas.items():
        monkeypatch.setattr(trainer.config.algorithm, "kl_penalty", kind)
        metrics = trainer._reward_kl(ready)
        expected = fields["token_level_scores"] - 0.5 * kl
        torch.testing.assert_close(fields["token_level_rewards"], expected, rtol=0, atol=1e-5)
        length = fields["response_mask"].sum(-1)
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(float((kl.sum(-1) / length).mean()), rel=1e-4)


def test_the_old_log_probs_come_from_where_the_setting_says(trainer, generated, monkeypatch):
    actor = trainer.config.actor_rollout_ref.actor
    monkeypatch.setattr(trainer, "sizes", replace(trainer.sizes, updates_per_step=1))
    needed = {}
    for source in ("auto", "trainer", "rollout"):
        monkeypatch.setattr(actor, "old_log_probs", source)
        needed[source] = trainer._needs_old_log_probs()
    assert needed == {"auto": False, "trainer": True, "rollout": True}  # one update per batch has none unless told
    ours = trainer.actor_rollout_wg.compute_log_prob(generated).batch["old_log_probs"]
    theirs = generated.batch["rollout_log_probs"] = ours - 0.5
    for source, exact, expected in (("rollout", False, theirs), ("trainer", True, ours), ("auto", True, theirs)):
        monkeypatch.setattr(actor, "old_log_probs", source)
        monkeypatch.setattr(trainer.first_batch, "rollout_is_exact", exact)
        assert torch.equal(trainer._old_log_probs(generated).batch["old_log_probs"], expected), source


def test_rows_that_older_weights_sampled_keep_the_log_probs_of_those(trainer, generated):
    """A group that waited for this step was sampled by the weights of an earlier one: they are its old policy."""
    ours = trainer.actor_rollout_wg.compute_log_prob(generated).batch["old_log_probs"]
    generated.batch["rollout_log_probs"] = ours - 0.5
    older = generated.non_tensor_batch["policy_versions"]
    for row in (0, 1, 2):
        older[row] = [(trainer.step - 1, 6)]
    found = trainer._old_log_probs(generated).batch["old_log_probs"]
    assert torch.equal(found[:3], ours[:3] - 0.5) and torch.equal(found[3:], ours[3:])
