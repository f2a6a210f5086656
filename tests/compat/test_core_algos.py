"""verl's algorithms: its signatures, its numbers, and what is registered with its decorators trains."""

import pytest
import torch
import verl_numbers as verl

import posttrain
from posttrain.algorithms import AlgorithmError
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

ACTOR = ActorConfig(clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.3)


def close(found, expected, tolerance=2e-4):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", verl.FURTHER)
def test_estimators_give_verls_advantages(name):
    advantages, returns = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=verl.REWARDS, response_mask=verl.MASK, config=AlgoConfig(gamma=0.9), **verl.FURTHER[name]
    )
    close(advantages, verl.ESTIMATES[name])
    assert returns.shape == advantages.shape


def test_gae_passk_and_gdpo_of_parts_give_verls_advantages():
    advantages, returns = core_algos.compute_gae_advantage_return(verl.REWARDS, verl.VALUES, verl.MASK, 0.9, 0.8)
    close(advantages, verl.ESTIMATES["gae"][0])
    close(returns, verl.ESTIMATES["gae"][1])
    four = {"token_level_rewards": verl.REWARDS[:4], "response_mask": verl.MASK[:4], "index": verl.INDEX[:4]}
    passk = core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GRPO_PASSK)
    close(passk(**four, config=AlgoConfig())[0], verl.ESTIMATES["grpo_passk"])
    with pytest.raises(ValueError, match="at least 2"):
        passk(verl.REWARDS, verl.MASK, verl.INDEX, config=AlgoConfig())
    config = AlgoConfig(gdpo_reward_keys=["x", "y"], gdpo_reward_weights=[1.0, 0.5])
    whole = {"non_tensor_batch": verl.PARTS, "batch": {}}
    parts, _ = core_algos.compute_gdpo_outcome_advantage(verl.REWARDS, verl.MASK, verl.INDEX, config=config, **whole)
    close(parts, verl.GDPO_OF_PARTS)


@pytest.mark.parametrize("mode", verl.MODES)
def test_losses_are_aggregated_as_in_verl(mode):
    alone, whole = verl.AGGREGATED[mode]
    close(core_algos.agg_loss(verl.VALUES, verl.MASK, mode), alone)
    counts = {"dp_size": 2, "batch_num_tokens": 50, "global_batch_size": 9, "loss_scale_factor": 7}
    close(core_algos.agg_loss(verl.VALUES, verl.MASK, mode, **counts), whole)


def test_aggregation_over_ranks_asks_for_the_counts_of_all():
    with pytest.raises(ValueError, match="batch_num_tokens"):
        core_algos.agg_loss(verl.VALUES, verl.MASK, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        core_algos.agg_loss(verl.VALUES, verl.MASK, "median")


@pytest.mark.parametrize("kind", verl.KLS)
def test_kl_estimates_and_their_gradients_are_verls(kind):
    new = verl.NEW.clone().requires_grad_()
    found = core_algos.kl_penalty(new, verl.OLD, kl_penalty=kind)
    found.sum().backward()
    close(found[0].detach(), verl.KL[kind][0])
    close(new.grad[0], verl.KL[kind][1])


@pytest.mark.parametrize("name", verl.LOSS_NAMES)
def test_policy_losses_and_their_gradients_are_verls(name):
    new = verl.NEW.clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=verl.OLD,
        log_prob=new,
        advantages=verl.ADVANTAGES,
        response_mask=verl.MASK,
        loss_agg_mode="token-mean",
        config=ACTOR,
    )
    loss.backward()
    close(loss.detach(), verl.LOSSES[name][0])
    close(new.grad, verl.LOSSES[name][1])
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("name", verl.WEIGHTED)
def test_policy_losses_with_importance_weights_are_verls(name):
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=verl.OLD,
        log_prob=verl.NEW,
        advantages=verl.ADVANTAGES,
        response_mask=verl.MASK,
        loss_agg_mode="token-mean",
        config=ACTOR,
        rollout_is_weights=verl.WEIGHTS,
    )
    close(loss, verl.WEIGHTED[name])


def test_older_forms_and_the_critics_loss_are_verls():
    found = core_algos.compute_policy_loss(verl.OLD, verl.NEW, verl.ADVANTAGES, verl.MASK, 0.2)
    close(torch.stack([value.detach() for value in found]), verl.OLD_LOSS)
    value = core_algos.compute_value_loss(verl.VALUES, verl.VALUES + 0.7, verl.VALUES - 0.8, verl.MASK, 0.5)
    close(torch.stack(list(value)), verl.VALUE_LOSS)
    close(core_algos.compute_entropy_loss(verl.LOGITS, verl.MASK), verl.ENTROPY)
    rewards = core_algos.compute_rewards(verl.REWARDS, verl.NEW, verl.OLD, 0.5)
    close(rewards, verl.REWARDS - 0.5 * (verl.NEW - verl.OLD))


def test_cppo_takes_its_settings_from_verls_group_and_drops_what_verl_drops():
    old, new = torch.tensor([[0.1, 0.4, 0.5, 0.6]]).log(), torch.tensor([[0.28, 0.45, 0.58, 0.61]]).log()
    own = {"cppo_w_min": 0.7, "cppo_delta_b": 0.02, "cppo_delta_b_q": 0.5, "cppo_delta_b_max_mult": 5.0}
    section = {"clip_ratio": 0.15, "clip_ratio_c": 2.0}
    tensors = (old, new, torch.ones(1, 4), torch.ones(1, 4))
    loss, metrics = core_algos.compute_policy_loss_cppo(*tensors, config=section | {"policy_loss": {"cppo": own}})
    # Shifts 0.18, 0.05, 0.08, 0.01 weigh 1, 0.9, 0.8, 0.7, and their median 0.065 is the budget. The first is over
    # 0.15; so are 0.045 over 0.15 + 0.065 - 0.18 and 0.064 over 0.15 + 0.1235 - 0.225. Only the last token counts.
    close(loss, -(0.61 / 0.6) * new[0, 3] / 4)
    assert metrics["actor/pg_clipfrac"] == 0.75
    flat, _ = core_algos.compute_policy_loss_cppo(*tensors, config=section | {"policy_loss": own})
    assert flat == loss and core_algos.get_policy_loss_fn("cppo") is core_algos.compute_policy_loss_cppo


def test_kl_controllers_move_as_verls():
    controller = core_algos.AdaptiveKLController(0.2, 6.0, 100)
    controller.update(9.0, 10)
    assert controller.value == pytest.approx(0.204)
    controller.update(1.0, 10)
    assert controller.value == pytest.approx(0.19992)


def test_a_name_of_an_estimator_is_given_once():
    core_algos.register_adv_est("mine")(first := lambda **kwargs: None)
    assert core_algos.get_adv_estimator_fn("mine") is first
    with pytest.raises(ValueError, match="already been registered"):
        core_algos.register_adv_est("grpo")(lambda **kwargs: None)
    with pytest.raises(ValueError, match="Unknown advantage estimator simply: nothing"):
        core_algos.get_adv_estimator_fn("nothing")
    with pytest.raises(ValueError, match="Unsupported loss mode"):
        core_algos.get_policy_loss_fn("nothing")


def odd_reward(solution_str, ground_truth):
    return {"score": len(solution_str) % 3 / 2, "length": len(solution_str)}


def train(tiny_model, sums, out, **more):
    settings = {
        "actor_rollout_ref.model.path": str(tiny_model),
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "data.train_files": str(sums["train"]),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 1,
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(out),
        "trainer.export_hf": "none",
        "trainer.save_freq": -1,
        "reward.num_workers": 1,
    }
    return posttrain.train(settings | more, reward=odd_reward).metrics[0]


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
GRAD = "actor/grad_norm"


def test_algorithms_registered_with_verls_decorators_train_as_posttrains(tiny_model, sums, tmp_path):
    seen = {}

    @core_algos.register_adv_est("mean_of_group")
    def compute_mean(token_level_rewards, response_mask, index, config=None, non_tensor_batch=None, **kwargs):
        seen["estimator"] = (config.gamma, config.get("no_such_setting", 7), sorted(non_tensor_batch))
        return core_algos.compute_grpo_outcome_advantage(
            token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=config["norm_adv_by_std_in_grpo"]
        )

    @core_algos.register_policy_loss("plain")
    def compute_plain(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        assert isinstance(config, ActorConfig)
        seen["counts"] = config.global_batch_info
        loss = -advantages * torch.exp(log_prob - old_log_prob)
        share = core_algos.agg_loss(loss, response_mask, loss_agg_mode, **config.global_batch_info)
        return share, {"actor/mine": float(advantages.abs().max())}

    mode = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}
    split = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 5}
    theirs = train(
        tiny_model, sums, tmp_path / "a", **mode, **split, **{"algorithm.adv_estimator": "mean_of_group", LOSS: "plain"}
    )
    ours = train(tiny_model, sums, tmp_path / "b", **mode, **{"algorithm.adv_estimator": "grpo"})
    assert theirs[GRAD] == pytest.approx(ours[GRAD], rel=1e-4)
    assert theirs["actor/mine"] > 0
    assert seen["counts"]["global_batch_size"] == 12 and seen["counts"]["loss_scale_factor"] == 6
    assert seen["estimator"][:2] == (1.0, 7)
    assert {"length", "reward_model", "uid", "data_source"} <= set(seen["estimator"][2])


def test_a_loss_that_ignores_the_counts_is_weighed_by_its_tokens(tiny_model, sums, tmp_path):
    @core_algos.register_policy_loss("own_mean")
    def compute_own_mean(old_log_prob, log_prob, advantages, response_mask, **kwargs):
        losses = -advantages * torch.exp(log_prob - old_log_prob)
        return core_algos.verl_F.masked_mean(losses, response_mask), {}

    split = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 5, "algorithm.adv_estimator": "grpo"}
    theirs = train(tiny_model, sums, tmp_path / "a", **split, **{LOSS: "own_mean"})
    ours = train(tiny_model, sums, tmp_path / "b", **{"algorithm.adv_estimator": "grpo"})
    assert theirs[GRAD] == pytest.approx(ours[GRAD], rel=1e-4)


def test_an_error_in_a_registered_loss_names_its_line(tiny_model, sums, tmp_path):
    @core_algos.register_policy_loss("broken")
    def compute_broken(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        return log_prob.no_such_thing

    with pytest.raises(AlgorithmError, match=r"`broken` failed in .*test_core_algos.py, line \d+: AttributeError"):
        train(tiny_model, sums, tmp_path, **{"algorithm.adv_estimator": "grpo", LOSS: "broken"})
