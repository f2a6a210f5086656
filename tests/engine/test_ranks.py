"""One model on 1, 2 and 4 processes (gloo): equal losses, gradients, weights, checkpoints and exports.

The processes run once (`rank_runs.py`) and all tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import STEPS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MANY = [2, 4]


class Worlds:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = {n: torch.load(folder / f"world_{n}.pt", weights_only=True) for n in (1, 2, 4)}

    def both(self, check: str, ranks: int) -> tuple[Any, Any]:
        return self.found[1][check], self.found[ranks][check]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, tiny_model, forked) -> Worlds:
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [forked.python, str(HERE / "rank_runs.py"), str(folder), str(tiny_model)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return Worlds(folder)


def furthest(one: Any, other: Any) -> float:
    """The largest difference between two results."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(furthest(one[key], other[key]) for key in one)
    if isinstance(one, list):
        assert len(one) == len(other) > 0
        return max(furthest(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype
        return float((one.double() - other.double()).abs().max())
    return abs(one - other)


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize(
    "check", ["float64", "clipped", "padded", "adapters", "expert_adapters", "value_head", "pairs"]
)
def test_in_float64_all_numbers_and_weights_are_those_of_one_process(worlds, check, ranks):
    one, many = worlds.both(check, ranks)
    assert furthest(one, many) < 1e-9


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("check", ["mixture", "mixture_recomputed", "mixture_sequence"])
def test_replayed_routes_and_balanced_loads_are_those_of_one_process(worlds, check, ranks):
    one, many = worlds.found[1]["mixture"], worlds.found[ranks][check]
    assert max(furthest(one[name], many[name]) for name in ("losses", "norms", "weights")) < 1e-9
    assert max(furthest(one[name], many[name]) for name in ("loads", "changes")) < 1e-6  # measured in float32
    assert min(one["changes"]) > 0.5 and min(one["norms"]) > 0.1


def test_the_runs_that_are_compared_learn_something(worlds):
    one = worlds.found[1]
    assert len(one["float64"]["losses"]) == STEPS and min(one["float64"]["norms"]) > 0.1
    assert furthest(one["float64"]["weights"], one["clipped"]["weights"]) > 1e-4
    assert furthest(one["padded"]["weights"], one["clipped"]["weights"]) > 1e-4
    assert min(one["value_head"]["norms"]) > 0.01 and min(one["pairs"]["norms"]) > 0
    assert one["adapters"]["base"] != one["adapters"]["log_probs"]


@pytest.mark.parametrize("ranks", [1, *MANY])
def test_weights_that_were_elsewhere_between_updates_are_trained_as_those_that_stayed(worlds, ranks):
    moved, stayed = worlds.found[ranks]["moved"], worlds.found[1]["float64"]
    assert furthest(moved["weights"], stayed["weights"]) < 1e-9 and abs(moved["log_probs"] - stayed["log_probs"]) < 1e-9


@pytest.mark.parametrize("ranks", MANY)
def test_in_float32_losses_and_gradient_norms_agree_and_the_fused_layer_is_used(worlds, ranks):
    one, many = worlds.both("float32_fused", ranks)
    for name in ("losses", "norms"):
        assert furthest(one[name], many[name]) < 1e-5
    from posttrain.kernels.train import can_train

    assert (many["fused"] > 0) == (one["fused"] > 0) == can_train(torch.zeros(1))


@pytest.mark.parametrize("ranks", [1, *MANY])
def test_adapters_of_experts_in_layers_that_are_computed_again_are_trained_alike(worlds, ranks):
    assert furthest(worlds.found[1]["expert_adapters"], worlds.found[ranks]["expert_adapters_recomputed"]) < 1e-9
    assert worlds.found[1]["expert_adapters"]["base"] != worlds.found[1]["expert_adapters"]["log_probs"]


@pytest.mark.parametrize("ranks", MANY)
def test_layers_that_are_computed_again_give_the_same_gradients(worlds, ranks):
    one, many = worlds.both("checkpointed_layers", ranks)
    assert max(furthest(one[name], many[name]) for name in ("losses", "norms")) < 1e-5


@pytest.mark.parametrize("ranks", MANY)
def test_in_bfloat16_the_ranks_hold_float32_and_compute_in_bfloat16(worlds, ranks):
    one, many = worlds.both("bfloat16", ranks)
    assert one["held"] == many["held"] == ["torch.float32"]
    assert many["weights"].keys() == one["weights"].keys()
    assert all(weight.dtype is torch.bfloat16 for weight in many["weights"].values())
    assert furthest(one["norms"], many["norms"]) < 0.02 * max(one["norms"])


@pytest.mark.parametrize("ranks", MANY)
def test_a_rank_takes_its_part_from_the_pages_of_the_file_and_holds_one_layer_more_at_most(worlds, ranks):
    _, found = worlds.both("loaded", ranks)
    assert found["before"] == 0 and len(found["own"]) == 3  # two layers, and what is left
    assert found["own"] == found["parts"] and found["same"]


def test_copies_of_a_model_over_two_ranks_each_equal_one_over_four(worlds):
    whole, copies = worlds.found[1]["float64"], dict(worlds.found[4]["copies"])
    passes, reduced, parts = copies.pop("reduced")
    assert furthest(whole, copies) < 1e-9
    assert passes > 1 and reduced == parts  # gradients go between copies once, in the last pass


@pytest.mark.parametrize("ranks", MANY)
def test_ranks_that_share_the_tokens_of_their_rows_equal_one_process(worlds, ranks):
    assert furthest(worlds.found[1]["float64"], worlds.found[ranks]["sequence"]) < 1e-9


def test_shared_tokens_in_float32_with_layers_computed_again_and_of_pairs(worlds):
    one, many = worlds.found[1]["checkpointed_layers"], worlds.found[2]["sequence_float32"]
    assert max(furthest(one[name], many[name]) for name in ("losses", "norms")) < 1e-5
    assert furthest(worlds.found[1]["pairs"], worlds.found[2]["sequence_pairs"]) < 1e-9


def test_models_whose_tokens_cannot_be_shared_are_refused_in_words(worlds):
    found = worlds.found[4]["refusals"]
    assert (
        "ulysses_sequence_parallel_size=4: " in found["heads"] and "4 heads of queries and 2 of keys" in found["heads"]
    )
    assert "ulysses_sequence_parallel_size=2: " in found["padded"] and "use_remove_padding" in found["padded"]


@pytest.mark.parametrize("ranks", MANY)
def test_an_infinite_loss_on_one_rank_makes_all_skip_the_step(worlds, ranks):
    assert worlds.found[ranks]["not_finite"] == {"skipped": 1.0, "same": True}


def test_a_rank_whose_rows_have_no_answers_does_not_keep_the_others_waiting(worlds):
    assert furthest(*worlds.both("without_answers", 2)) < 1e-9 and worlds.found[1]["without_answers"]["norm"] > 0.1


@pytest.mark.parametrize("now, saved", [(4, 4), (2, 4), (1, 4), (2, 2), (1, 2), (1, 1)])
def test_a_checkpoint_of_any_number_of_ranks_goes_on_on_fewer(worlds, now, saved):
    straight = worlds.found[1]["checkpoint"]["from_1"]
    assert furthest(straight, worlds.found[now]["checkpoint"][f"from_{saved}"]) < 1e-9


def test_a_checkpoint_of_four_ranks_has_the_layout_of_one(worlds):
    from posttrain.checkpoint import CheckpointManager, verify

    manager = CheckpointManager(worlds.folder / "checkpoints")
    kinds = {ranks: manager.describe(manager.path_of(ranks), "actor") for ranks in (1, 2, 4)}
    assert kinds[1] == kinds[2] == kinds[4] and len(kinds[1]) > 30
    assert [verify(manager.path_of(ranks)) for ranks in (1, 2, 4)] == [[], [], []]
    assert len(list((manager.path_of(4) / "actor").glob("*.distcp"))) == 4


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("kind", ["exported", "merged", "adapter", "merged_experts", "adapter_experts"])
def test_exported_folders_are_those_of_one_process(worlds, kind, ranks):
    from safetensors.torch import load_file

    one, many = (worlds.folder / f"{kind}_{count}" for count in (1, ranks))
    assert [file.name for file in sorted(one.iterdir())] == [file.name for file in sorted(many.iterdir())]
    for file in one.iterdir():
        if file.suffix == ".safetensors":
            assert furthest(load_file(file), load_file(many / file.name)) < 1e-9
        else:
            assert file.read_text() == (many / file.name).read_text()


def test_sizes_that_do_not_divide_the_ranks_are_refused_in_words(worlds):
    assert "fsdp_config.fsdp_size=3: the run has 4 ranks" in worlds.found[4]["refusals"]["fsdp"]
    assert "set one of 1, 2, 4" in worlds.found[4]["refusals"]["fsdp"]
