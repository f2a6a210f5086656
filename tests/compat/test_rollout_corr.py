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
