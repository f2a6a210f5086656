"""Algorithms by name: registering, finding, and calling those that users write."""

from __future__ import annotations

from enum import Enum

import numpy as np
import pytest
import torch

from posttrain import algorithms
from posttrain.algorithms import AlgorithmError, call_policy_loss, registry
from posttrain.config.choices import CRITIC_ESTIMATORS, ESTIMATORS, GROUP_ESTIMATORS
from posttrain.config.choices import POLICY_LOSSES as LOSS_NAMES
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.trainer.ppo import core_algos
from posttrain.trainer.ppo.core_algos import (
    AdvantageEstimator,
    compute_advantage,
    compute_grpo_outcome_advantage,
    get_adv_estimator,
    get_policy_loss,
    register_adv_est,
    register_policy_loss,
)


def batch() -> dict[str, torch.Tensor]:
    log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    return {
        "old_log_prob": log_prob.detach(),
        "log_prob": log_prob,
        "advantages": torch.tensor([[1.0, 1.0], [-2.0, -2.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }


def test_the_front_door_gives_the_customary_names():
    for name in ("compute_grpo_outcome_advantage", "AdvantageEstimator", "register_adv_est", "register_policy_loss"):
        assert hasattr(core_algos, name)
    assert all(getattr(core_algos, name) is getattr(algorithms, name) for name in algorithms.__all__)


def test_grpo_is_found_by_string_and_by_enum():
    assert get_adv_estimator("grpo") is get_adv_estimator(AdvantageEstimator.GRPO)
    assert get_adv_estimator("grpo").function is compute_grpo_outcome_advantage
    assert AdvantageEstimator.GRPO == "grpo"


def test_another_function_under_a_taken_name_is_an_error_naming_both():
    with pytest.raises(AlgorithmError, match=r"`grpo`.*compute_grpo_outcome_advantage.*mine"):

        @register_adv_est(AdvantageEstimator.GRPO)
        def mine(**kwargs): ...

    with pytest.raises(AlgorithmError, match="vanilla"):
        register_policy_loss("vanilla")(lambda **kwargs: None)
    assert get_adv_estimator("grpo").function is compute_grpo_outcome_advantage


def test_the_same_definition_may_be_registered_again_and_the_newest_wins():
    def define():
        @register_adv_est("again")
        def estimator(token_level_rewards, **kwargs):
            return token_level_rewards, token_level_rewards

        return estimator

    define()
    newest = define()
    assert get_adv_estimator("again").function is newest


def test_two_lambdas_are_two_functions():
    register_policy_loss("by_lambda")(lambda **kwargs: 1)
    with pytest.raises(AlgorithmError, match="by_lambda"):
        register_policy_loss("by_lambda")(lambda **kwargs: 2)


def test_a_decorator_without_a_name_says_what_is_missing():
    with pytest.raises(AlgorithmError, match="name in quotes"):

        @register_adv_est  # type: ignore[arg-type]
        def estimator(**kwargs): ...


@pytest.mark.parametrize(
    ("find", "wrong", "near"), [(get_adv_estimator, "grop", "grpo"), (get_policy_loss, "vanila", "vanilla")]
)
def test_unknown_names_list_the_known_and_the_nearest(find, wrong, near):
    with pytest.raises(AlgorithmError, match=rf"`{wrong}`\. Did you mean `{near}`\? Known: .*{near}"):
        find(wrong)


@pytest.mark.parametrize(
    ("find", "wrong"), [(get_adv_estimator, "gspo"), (get_adv_estimator, "dapo"), (get_policy_loss, "vapo")]
)
def test_names_that_merely_look_alike_are_not_offered(find, wrong):
    with pytest.raises(AlgorithmError, match=rf"`{wrong}`\. Known: "):
        find(wrong)


def test_estimators_declare_what_the_trainer_must_know():
    assert {"grpo", "rloo"} <= set(registry.group_estimators())
    assert registry.critic_estimators() == ["gae"]
    assert [name for name, f in registry.ADV_ESTIMATORS.items() if f.needs_greedy_baseline] == ["remax"]
    register_adv_est("plain_estimator")(lambda **kwargs: None)
    found = get_adv_estimator("plain_estimator")
    assert (found.compares_group, found.needs_critic) == (False, False)


def test_the_names_that_the_settings_know_are_those_that_are_built():
    from posttrain.algorithms import AGGREGATION_MODES, KL_TYPES

    assert set(ESTIMATORS) == set(registry.ADV_ESTIMATORS) == {member.value for member in AdvantageEstimator}
    assert set(GROUP_ESTIMATORS) == set(registry.group_estimators())
    assert set(CRITIC_ESTIMATORS) == set(registry.critic_estimators())
    assert set(LOSS_NAMES) == set(registry.POLICY_LOSSES)
    table = leaves(PPOConfig)
    assert set(table["actor_rollout_ref.actor.loss_agg_mode"].choices) == set(AGGREGATION_MODES)
    assert set(table["actor_rollout_ref.actor.kl_loss_type"].choices) == {
        k + plus for k in KL_TYPES for plus in ("", "+")
    }


def test_a_users_estimator_is_called_with_these_names_and_index_and_config_in_kwargs():
    seen = {}

    @register_adv_est("my_estimator")
    def compute_my_advantage(token_level_rewards, response_mask, **kwargs):
        seen.update(kwargs)
        advantages = token_level_rewards * response_mask
        return advantages, advantages

    rewards, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])
    index, config = np.array(["u"]), {"gamma": 1.0}
    advantages, _ = compute_advantage(
        "my_estimator", token_level_rewards=rewards, response_mask=mask, index=index, config=config
    )
    assert advantages.tolist() == [[1.0, 0.0]]
    assert seen["index"] is index
    assert seen["config"] is config


def test_an_estimator_gets_only_what_it_asks_for_and_settings_by_name():
    @register_adv_est("narrow")
    def estimator(response_mask, gamma):
        return response_mask * gamma, response_mask * gamma

    advantages, _ = compute_advantage(
        "narrow", token_level_rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2), config={"gamma": 0.5}
    )
    assert advantages.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("given", [None, torch.zeros(1, 2), (torch.zeros(1, 2), torch.zeros(1))])
def test_an_estimator_that_gives_something_else_is_told_what_is_wanted(given):
    register_adv_est("odd")(lambda **kwargs: given)
    with pytest.raises(AlgorithmError, match=r"`odd` must return \(advantages, returns\).*\(1, 2\)"):
        compute_advantage("odd", token_level_rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2))


def test_a_users_scalar_loss_is_called_by_names_and_reported_as_scalar():
    @register_policy_loss("my_loss")
    def compute_my_policy_loss(old_log_prob, log_prob, advantages, response_mask, **kwargs):
        ratio = torch.exp(log_prob - old_log_prob)
        loss = -advantages * ratio
        loss = (loss * response_mask).sum() / response_mask.sum()
        return loss, {"my_metric": loss.item()}

    tensors = batch()
    result = call_policy_loss("my_loss", **tensors)
    assert result.is_scalar
    assert result.loss.item() == pytest.approx((-1 - 1 + 2) / 3)
    assert result.metrics == {"my_metric": pytest.approx(0.0)}
    result.loss.backward()
    assert torch.allclose(tensors["log_prob"].grad, torch.tensor([[-1 / 3, -1 / 3], [2 / 3, 0.0]]))


def test_the_run_can_say_that_a_scalar_depends_on_the_split():
    from posttrain.algorithms import scalar_loss_note

    assert "`my_loss`" in scalar_loss_note("my_loss")
    assert "depends on how the mini-batch is split" in scalar_loss_note("my_loss")


def test_a_missing_import_in_a_users_loss_is_named_with_file_and_line(tmp_path):
    file = tmp_path / "my_algorithm.py"
    file.write_text(
        "from posttrain.trainer.ppo.core_algos import register_policy_loss\n"
        "@register_policy_loss('forgot')\n"
        "def forgot(old_log_prob, log_prob, **kwargs):\n"
        "    return torch.exp(log_prob - old_log_prob), {}\n"
    )
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "my_algorithm"})
    with pytest.raises(
        AlgorithmError, match=r"`forgot`.*my_algorithm\.py, line 4: NameError.*`import torch`"
    ) as caught:
        call_policy_loss("forgot", **batch())
    assert isinstance(caught.value.__cause__, NameError)


def test_a_loss_that_wants_an_unknown_argument_is_named_by_its_own_file():
    @register_policy_loss("wants_more")
    def wants_more(log_prob, colour):
        return log_prob

    with pytest.raises(AlgorithmError, match=r"test_registry_and_calling\.py.*TypeError.*colour"):
        call_policy_loss("wants_more", **batch())


def test_running_out_of_memory_in_a_users_loss_stays_what_it_is():
    @register_policy_loss("large")
    def large(**kwargs):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        call_policy_loss("large", **batch())


def test_a_users_token_losses_are_zeroed_outside_the_mask_and_metrics_may_be_left_out():
    @register_policy_loss("tokens")
    def tokens(log_prob, response_mask):
        return log_prob / response_mask

    result = call_policy_loss("tokens", **batch())
    assert not result.is_scalar
    assert result.loss.tolist() == [[-1.0, -2.0], [-0.5, 0.0]]
    assert result.metrics == {}


def test_metrics_of_a_users_loss_carry_no_gradient():
    @register_policy_loss("metrics")
    def metrics(log_prob, **kwargs):
        return log_prob, {"number": log_prob.sum(), "tokens": log_prob * 2, "array": np.float32(3)}

    result = call_policy_loss("metrics", **batch()).metrics
    assert result["number"].item() == pytest.approx(-4.5)
    assert not result["number"].requires_grad
    assert not result["tokens"].requires_grad
    assert result["tokens"].tolist() == [[-2.0, -4.0], [-1.0, 0.0]]
    assert result["array"] == 3.0


@pytest.mark.parametrize("value", ["text", torch.zeros(5), None])
def test_a_metric_that_is_no_number_is_named(value):
    register_policy_loss("odd_metric")(lambda log_prob: (log_prob, {"m": value}))
    with pytest.raises(AlgorithmError, match="metric `m` of the policy loss `odd_metric`"):
        call_policy_loss("odd_metric", **batch())


@pytest.mark.parametrize("given", [1.0, torch.zeros(2), (torch.zeros(2, 2), 3)])
def test_a_loss_that_gives_something_else_is_told_what_is_wanted(given):
    register_policy_loss("odd_loss")(lambda log_prob: given)
    with pytest.raises(AlgorithmError, match=r"`odd_loss` must return \(loss, metrics\).*\(2, 2\)"):
        call_policy_loss("odd_loss", **batch())


def test_importance_weights_that_a_loss_cannot_take_are_refused_not_ignored():
    register_policy_loss("deaf")(lambda log_prob: log_prob)
    with pytest.raises(AlgorithmError, match=r"rollout_is.*`deaf`"):
        call_policy_loss("deaf", **batch(), rollout_is_weights=torch.ones(2, 2))


def test_what_prepare_gave_reaches_the_loss_by_name():
    @register_policy_loss("prepared", prepare=lambda mini: {"largest": mini["advantages"].abs().max()})
    def loss(advantages, largest, **kwargs):
        return -advantages / largest, {}

    tensors = batch()
    prepare = get_policy_loss("prepared").prepare
    assert prepare is not None
    result = call_policy_loss("prepared", **tensors, prepared=prepare(tensors))
    assert result.loss.tolist() == [[-0.5, -0.5], [1.0, 0.0]]
    assert get_policy_loss("vanilla").prepare is None


def test_enums_of_other_packages_name_algorithms_too():
    class Theirs(Enum):
        GRPO = "grpo"

    assert get_adv_estimator(Theirs.GRPO).function is compute_grpo_outcome_advantage


def test_a_scalar_loss_that_takes_counts_gives_its_share():
    from posttrain.algorithms import agg_loss

    @register_policy_loss("shared_out")
    def shared_out(log_prob, advantages, response_mask, loss_agg_mode, counts, **kwargs):
        return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **counts), {}

    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    counts = {"total_tokens": 5, "total_rows": 3, "loss_scale_factor": 2.0}
    parts = []
    for rows in (slice(0, 1), slice(1, 3)):
        tensors = {"old_log_prob": log_prob[rows], "log_prob": log_prob[rows], "response_mask": mask[rows]}
        config = {"loss_agg_mode": "seq-mean-token-mean"}
        made = call_policy_loss(
            "shared_out", **tensors, advantages=torch.ones(3, 2)[rows], config=config, counts=counts
        )
        assert made.is_scalar and made.is_share
        parts.append(float(made.loss))
    assert sum(parts) == pytest.approx((1.5 + 3.5 + 5.0) / 3)
