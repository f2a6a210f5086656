"""What counts as rounding when two passes over the same tokens are compared."""

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.models.proof import beyond_rounding, compute_plain, disagreement
from posttrain.rollout.weight_buckets import SyncError
from posttrain.workers.policy import WeightProbe


def noisy(log_probs, mean):
    """The log-probs with differences of this size on average, a few of them five times as large."""
    noise = torch.full_like(log_probs, mean)
    noise[::20] *= 5
    noise *= mean / noise.mean()
    return log_probs + noise * (-1.0) ** torch.arange(len(log_probs))


UNLIKELY = -torch.linspace(9, 22, 60, dtype=torch.float64)  # what a trained model thinks of random tokens
LIKELY = -torch.linspace(0.1, 3, 60, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "log_probs", "mean", "same"), [
    (torch.bfloat16, UNLIKELY, 0.14, True),  # as far as two passes of SmolLM2-135M are apart
    (torch.bfloat16, UNLIKELY, 1.0, False),
    (torch.bfloat16, LIKELY, 0.05, True),
    (torch.bfloat16, LIKELY, 0.3, False),
    (torch.float32, UNLIKELY, 2e-4, True),
    (torch.float32, UNLIKELY, 1e-3, False),
    (torch.float64, UNLIKELY, 1e-5, False),
])  # fmt: skip
def test_rounding_grows_with_the_log_probs_and_a_wrong_pass_is_beyond_it(dtype, log_probs, mean, same):
    found = beyond_rounding(noisy(log_probs, mean), log_probs, dtype)
    assert (found == "") is same
    if not same:
        assert f"by {mean:.3g} on average" in found and str(dtype) in found


@pytest.mark.parametrize(("dtype", "log_probs", "within", "beyond"), [
    (torch.bfloat16, UNLIKELY, 3.0, 4.5),
    (torch.bfloat16, LIKELY, 1.9, 2.6),
    (torch.float32, UNLIKELY, 2e-3, 4e-3),
    (torch.float64, UNLIKELY, 5e-5, 2e-4),
])  # fmt: skip
def test_one_token_may_be_off_by_more_than_all_on_average_but_not_by_any_amount(dtype, log_probs, within, beyond):
    for gap, same in ((within, True), (beyond, False)):
        off = log_probs.clone()
        off[7] -= gap
        assert (beyond_rounding(off, log_probs, dtype) == "") is same, gap
    assert "at most" in beyond_rounding(off, log_probs, dtype)


def test_what_is_no_number_is_beyond_rounding():
    assert beyond_rounding(UNLIKELY.clone().fill_(math.nan), UNLIKELY, torch.bfloat16)


class Scores:
    """A trainer and an engine in one: fixed log-probs of the probe's rows."""

    rounding = None

    def __init__(self, log_probs, dtype=torch.bfloat16):
        self.given, self.dtype = log_probs, dtype

    def facts(self):
        return self

    def log_probs(self, batch):
        return {"log_probs": self.given}

    def score(self, rows):
        return list(self.given)


CASES = [(torch.bfloat16, 0.14, False), (torch.bfloat16, 1.5, True), (torch.float32, 0.14, True)]


@pytest.mark.parametrize(("dtype", "mean", "stops"), CASES)
def test_the_probe_after_a_sync_stops_at_wrong_weights_and_not_at_rounding(dtype, mean, stops):
    probe = WeightProbe(type("Tokenizer", (), {"pad_token_id": 0}), 100)
    ours = UNLIKELY[:44].view(4, 11)
    theirs = noisy(UNLIKELY[:44], mean).view(4, 11)
    if stops:
        with pytest.raises(SyncError, match=rf"differ from the trainer's by {mean} on average"):
            probe.compare(Scores(ours, dtype), Scores(theirs))
    else:
        assert probe.compare(Scores(ours, dtype), Scores(theirs))["sync/probe_max"] == pytest.approx(0.55, abs=0.1)


class Model:
    """What `compute_plain` reads of a model."""

    def __init__(self, dtype):
        self.dtype, self.config = dtype, SimpleNamespace(vocab_size=97, get_text_config=lambda: self.config)

    def modules(self):
        return []


def test_a_pass_in_half_precision_agrees_on_two_of_three_pairs_of_rows(monkeypatch):
    monkeypatch.setattr("posttrain.models.proof.configurations", lambda model: [])
    monkeypatch.setattr("posttrain.models.proof.without_adapters", lambda model: model)

    def found(dtype, wrong):
        model, seen = Model(dtype), []
        plain = compute_plain(model, "a model", lambda model, rows: [torch.zeros(len(row)) for row in rows])

        def compute(model, rows):
            seen.append(rows)
            at = [plain.rows, *(pair.rows for pair in plain.others)].index(rows)
            return [torch.full((len(row),), float(at in wrong)) for row in rows]

        return disagreement(model, plain, compute, torch.equal), len(seen)

    differs = "the log-probs differ"
    assert found(torch.bfloat16, {}) == found(torch.bfloat16, {2}) == (None, 2)
    assert found(torch.bfloat16, {0}) == found(torch.bfloat16, {1}) == (None, 3)
    assert found(torch.bfloat16, {0, 1}) == (differs, 2)
    assert found(torch.bfloat16, {0, 2}) == found(torch.bfloat16, {1, 2}) == (differs, 3)
    assert found(torch.float32, {}) == (None, 1)
    assert found(torch.float32, {0}) == (differs, 1)
