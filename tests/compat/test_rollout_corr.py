"""The gap between rollout and trainer, with the numbers of verl 0.9.1."""

import pytest
import torch

from verl.trainer.ppo import rollout_corr_helper as helper

OLD = torch.tensor([[-0.5, -1.0, -0.2], [-2.0, -0.3, -9.0]])
ROLLOUT = torch.tensor([[-0.9, -0.8, -0.2], [-1.0, -0.5, -9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
WEIGHTS = {
    ("token", False): [1.2, 0.8187, 1.0, 0.3679, 1.2, 0.0],
    ("token", True): [1.3082, 0.8925, 1.0901, 0.401, 1.3082, 0.0],
    ("sequence", False): [1.2, 1.2, 1.2, 0.4493, 0.4493, 0.0],
    ("sequence", True): [1.4551, 1.4551, 1.4551, 0.5449, 0.5449, 0.0],
}
GAP = {"training_ppl": 2.4603, "kl": 0.12, "k3_kl": 0.1, "rollout_ppl": 2.0004, "log_ppl_abs_diff": 0.2333}
GAP |= {"ppl_ratio": 1.2137, "chi2_token": 0.1046, "chi2_seq": -0.1531, "log_ppl_diff_max": 0.4}


@pytest.mark.parametrize(("level", "normalised"), WEIGHTS)
def test_weights(level, normalised):
    found, _ = helper.compute_rollout_correction_weights(OLD - ROLLOUT, MASK, level, 1.2, normalised)
    assert found.flatten().tolist() == pytest.approx(WEIGHTS[level, normalised], abs=1e-4)


def test_weights_left_out_and_tokens_rejected():
    weights, _ = helper.compute_rollout_correction_weights(OLD - ROLLOUT, MASK, "token", "0.5_1.4")
    assert weights.flatten().tolist() == pytest.approx([0.0, 0.8187, 1.0, 0.0, 1.2214, 0.0], abs=1e-4)
    mask, _ = helper.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "token_k1", "0.7_1.3")
    assert mask.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert helper.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "seq_mean_k3", "0.02")[0].sum() == 0


def test_the_gap_and_all_at_once():
    found = helper.compute_offpolicy_metrics(OLD, ROLLOUT, MASK)
    assert {name: found[name] for name in GAP} == pytest.approx(GAP, abs=1e-4)
    weights, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK, "token", 1.2, False, "token_k2", "0.1"
    )
    assert weights.batch["rollout_is_weights"].shape == (2, 3) and mask.tolist() == [[1, 1, 1], [0, 1, 0]]
    assert metrics["rollout_corr/kl"] == pytest.approx(0.12)


def test_k1_is_compared_as_rollout_over_trainer():
    mask, metrics = helper.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "token_k1", "0.9_3.0")
    # -log r is -0.4, 0.2, 0 and 1, -0.2: kept from log 0.9 to log 3.
    assert mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert metrics["rollout_rs_token_k1_mean"] == pytest.approx(0.12)
    assert metrics["rollout_rs_token_k1_masked_fraction"] == pytest.approx(0.4)
    assert (metrics["rollout_rs_token_k1_max"], metrics["rollout_rs_token_k1_min"]) == pytest.approx((1.0, -0.4))


@pytest.mark.parametrize("name", sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_every_rule_tells_its_mean_and_what_it_rejects(name):
    mask, metrics = helper.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, name, 1.3)
    rejected = (MASK - mask).sum() / MASK.sum()
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(float(rejected))
    assert metrics[f"rollout_rs_{name}_masked_fraction"] == pytest.approx(float(rejected))
    assert f"rollout_rs_{name}_mean" in metrics


def test_one_threshold_serves_several_rules():
    both, metrics = helper.compute_rollout_rejection_mask(OLD - ROLLOUT, MASK, "token_k2,seq_max_k3", "0.1")
    assert both.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert metrics["rollout_rs_seq_masked_fraction"] == 0.5


def test_presets_set_what_their_names_say():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig as Config

    preset = Config.decoupled_geo_rs_seq_tis(rs_threshold=1.001)
    assert (preset.rollout_is, preset.rollout_rs, preset.rollout_rs_threshold) == ("sequence", "seq_mean_k1", 1.001)
    assert preset.rollout_is_threshold == 2.0 and not preset.bypass_mode
    assert Config.decoupled_token_icepop().rollout_is_threshold == "0.5_5.0"
    bypass = Config.bypass_pg_is(3.0)
    assert (bypass.bypass_mode, bypass.loss_type, bypass.rollout_is_threshold) == (True, "reinforce", 3.0)
    assert Config.disabled().rollout_is is None and Config().rollout_is == "sequence"
