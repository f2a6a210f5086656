"""Plans for a CUDA device: the formulas of its kernels, and what was measured there."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.bench.workload import PRESETS
from posttrain.config import load_config
from posttrain.kernels.cuda import MOST_TOKENS, bucket
from posttrain.planning import cuda_bytes
from posttrain.planning.memory_plan import GIB, WORKSPACES, Device
from posttrain.planning.rl import CAPTURED, RLPlanner, Shape

H200 = Device("cuda", int(139.8 * GIB), "an H200", hopper=True)
HALF: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "inner": 40,
    "heads": 4,
    "key_heads": 2,
    "size": 8,
    "vocabulary": 100,
    "itemsize": 2,
}
SIZES = cuda_bytes.Sizes(**HALF, normed_heads=False)


def plan(folder: Path, name: str, device: Device = H200, **more):
    """A GRPO step of 64 prompts of 128 tokens x 8 responses of 512, of a model of that shape."""
    preset = PRESETS[name]
    shape = {key: value for key, value in vars(preset).items() if key != "dtype"}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, **shape}))
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.model.dtype": "bfloat16",
        "data.train_files": "x.json",
        "data.train_batch_size": 64,
        "data.max_prompt_length": 128,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    }
    given |= {key.replace("__", "."): value for key, value in more.items()}
    return RLPlanner().plan(load_config(given).config, device)


LORA = {"actor_rollout_ref__model__lora_rank": 32}
LIGHT = {"actor_rollout_ref__model__enable_gradient_checkpointing": True}
WROTE = replace(H200, hopper=False)  # code that wrote all logits
MEASURED = {
    "0.5b": (H200, {}, {"load": 2.94, "generate": 7.58, "log-probs": 9.72, "update": 26.21}),
    "0.5b, earlier": (WROTE, {}, {"load": 2.94, "generate": 7.59, "update": 27.30}),
    "0.5b, adapters": (WROTE, LORA, {"generate": 2.35, "update": 20.31}),
    "1.5b": (WROTE, {}, {"load": 8.81, "generate": 22.57, "update": 55.77}),
    "1.5b, checkpointing": (WROTE, LIGHT, {"load": 8.81, "generate": 22.57, "update": 38.54}),
}
"""GiB by stage of 16 x 8 x 512 tokens on an H200; in the earlier code's update the head held a second gradient of 1.1
GiB."""


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_by_stage_are_those_that_were_measured(tmp_path, name):
    device, more, measured = MEASURED[name]
    sizes = {"data__train_batch_size": 16, "actor_rollout_ref__actor__ppo_mini_batch_size": 16}
    made = plan(tmp_path, name.split(",")[0], device, **sizes, **more)
    assert made.worst == "update"
    for stage, gib in measured.items():
        assert made.peak(stage) / GIB == pytest.approx(gib, rel=0.06 if stage == "update" else 0.02), stage
    shared = made.shape.packed_pass(Budget(16384), 8, 0.16)
    assert shared == (3 * (128 + 8 * 511), 3 * 8 * 512), "responses share their prompt"


def test_rows_of_110000_tokens_with_checkpointing_take_what_was_measured(tmp_path):
    """All tokens go through every layer but the last, which is computed for the few that are predicted."""
    given = {"data__train_batch_size": 1, "actor_rollout_ref__actor__ppo_mini_batch_size": 1}
    given |= {"data__max_prompt_length": 108000, "data__max_response_length": 2000, "actor_rollout_ref__rollout__n": 4}
    given |= {"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 131072, **LORA, **LIGHT}
    assert plan(tmp_path, "7b", **given).peak("update") / GIB == pytest.approx(75.5, rel=0.06)


@dataclass
class Budget:
    ppo_max_token_len_per_gpu: int
    ppo_micro_batch_size_per_gpu: int | None = None


@pytest.mark.parametrize(
    ("budget", "micro", "joining", "passed"),
    [
        (16384, None, 0.25, (25 * 639, 25 * 512)),  # joining would cost more than a prompt
        (16384, None, 0.0, (3 * (128 + 8 * 511), 24 * 512)),
        (100, None, 0.25, (639, 512)),  # one row is never cut
        (2000, None, 0.0, (128 + 3 * 511, 3 * 512)),  # a group is, where it is larger than a pass
        (16384, 4, 0.25, (4 * 639, 4 * 512)),
        (16384, 4, 0.0, (128 + 4 * 511, 4 * 512)),
        (10**6, None, 0.25, (512 * 639, 512 * 512)),  # all rows of the mini-batch
    ],
)
def test_the_largest_pass_is_what_packing_makes_of_the_longest_rows(tmp_path, budget, micro, joining, passed):
    shape = Shape(1, 640, 128, 512, 512, 512, 64)
    assert shape.packed_pass(Budget(budget, micro), 8, joining) == passed


def test_a_kept_cache_and_captured_steps_stay_in_every_stage_and_a_large_cache_does_not(tmp_path):
    kept = plan(tmp_path, "0.5b")
    for part in ("KV cache", CAPTURED):
        assert part not in kept.stages["load"] and kept.largest(part) > 0
        assert len({parts[part] for stage, parts in kept.stages.items() if stage != "load"}) == 1
    small = Device("cuda", 24 * GIB, "a GPU of 24 GiB")  # 3.5 GiB of cache are more than an eighth of it
    given_back = plan(tmp_path, "0.5b", small)
    assert given_back.stages["generate"]["KV cache"] > 3 * GIB and "KV cache" not in given_back.stages["update"]
    assert given_back.stages["update"][CAPTURED] == given_back.stages["generate"][CAPTURED] > 0, (
        "they stay all the same"
    )


def test_while_models_are_loaded_there_are_weights_and_masters_and_of_adapters_room_to_join_matrices(tmp_path):
    whole, adapted = plan(tmp_path, "0.5b"), plan(tmp_path, "0.5b", actor_rollout_ref__model__lora_rank=32)
    weights = whole.largest("actor weights")
    assert whole.peak("load") == weights + 2 * weights + WORKSPACES, "bfloat16, and float32 masters of it"
    joined = 2 * 4864 * 896 * 2  # gate and up
    assert adapted.peak("load") == adapted.largest("actor weights") + joined + WORKSPACES


def test_nothing_is_gathered_where_a_kernel_reads_the_cache(tmp_path):
    """Temporary tensors of decoding do not grow with the length of the rows."""
    short, long = (plan(tmp_path, "0.5b", data__max_response_length=n).stages["generate"] for n in (512, 8192))
    assert short["temporary tensors"] == long["temporary tensors"]


@pytest.mark.parametrize(
    ("normed", "halves", "wide"),
    [
        (False, 4 * 16 + (4 + 2 * 2) * 8 + 4 * 8 + 2 * 40, 4 + 2),
        (True, 4 * 16 + (4 + 2 * 2) * 8 + 4 * 8 + 2 * 40 + (4 + 2) * 8, 4 + 2 + 4 + 2),
    ],
)
def test_a_token_keeps_what_the_fused_layer_saves(normed, halves, wide):
    assert cuda_bytes.Sizes(**HALF, normed_heads=normed).kept == 2 * halves + 4 * wide


MIB64 = 4 << 24  # the least that a chunk of logits is


@pytest.mark.parametrize(
    ("predicted", "memory", "chunk"),
    [
        (1000, 1 << 20, 4 * 100 * 1000),  # all of them are less than the least
        (10**9, 1 << 20, MIB64 // 400 * 400),
        (10**9, 64 * 400 * 10**6, 400 * 10**6),  # a sixty-fourth of the device
    ],
)
def test_a_chunk_of_logits_is_a_share_of_the_device(predicted, memory, chunk):
    assert cuda_bytes.chunk_bytes(SIZES, predicted, memory) == chunk


@pytest.mark.parametrize(("memory", "predicted"), [(1 << 40, 50), (1 << 40, 10**6), (1 << 20, 10**6)])
def test_an_update_holds_layers_logits_and_the_heads_gradient(memory, predicted):
    """Logits wait for the backward pass up to a sixteenth of the device; otherwise a chunk is computed again."""
    logits, chunk = 4 * 100 * predicted, cuda_bytes.chunk_bytes(SIZES, predicted, memory)
    held = logits if 16 * logits <= memory else chunk
    table = 4 * 100 * 16 * (1 if logits == chunk else 2)
    kept = 2 * 60 * SIZES.kept + 2 * 60 * 8 * 2 + 2 * predicted * 16 * 2
    head = held + chunk // 2 + 4 * predicted * 16
    layer = 60 * SIZES.going_back(min(1.0, predicted / 60))
    found = cuda_bytes.update_bytes(SIZES, 60, predicted, False, memory)
    assert found == (kept, kept + max(head, layer)) and (layer > head) == (predicted == 50)
    ranks = cuda_bytes.update_bytes(SIZES, 60, predicted, False, memory, alone=False)
    assert ranks == (kept, kept + max(head + table, layer)), "cut over ranks, each pass has a gradient of the head"


def test_with_checkpointing_inputs_are_kept_and_one_layer_is_there_again():
    full, light = (cuda_bytes.update_bytes(SIZES, 10**6, 1, again, 1 << 40) for again in (False, True))
    assert full[0] - light[0] == 2 * 10**6 * (SIZES.kept - 16 * 2)
    # One token is predicted: the worst is the layer before the last, whose next has let go what it kept.
    assert light[1] - light[0] == 10**6 * (SIZES.kept + SIZES.going_back(1.0) - 16 * 2)
    assert full[1] - full[0] == 10**6 * max(SIZES.going_back(1e-6), SIZES.going_back(1.0) - SIZES.kept)
    single = replace(SIZES, layers=1)  # the last layer is the only one
    assert _beside(single, again=True) == 10**6 * (SIZES.kept + SIZES.going_back(1e-6))
    assert _beside(single, again=False) == 10**6 * SIZES.going_back(1e-6)


def _beside(sizes: cuda_bytes.Sizes, *, again: bool) -> int:
    kept, most = cuda_bytes.update_bytes(sizes, 10**6, 1, again, 1 << 40)
    return most - kept


def test_of_few_tokens_the_gradient_of_the_look_up_is_the_most():
    wide = cuda_bytes.update_bytes(replace(SIZES, vocabulary=10**6, width=10**4), 1, 1, False, 1 << 40)
    assert wide[1] == 2 * 10**6 * 10**4


def test_adapters_keep_their_low_rank_inputs_and_the_head_has_no_gradient(tmp_path):
    adapted = cuda_bytes.Sizes(**HALF, normed_heads=False, ranks=7 * 3)
    assert adapted.kept - SIZES.kept == 2 * 7 * 3
    memory, table = 1 << 40, 4 * 100 * 16
    full, lean = (cuda_bytes.update_bytes(sizes, 60, 10**4, False, memory, alone=False) for sizes in (SIZES, adapted))
    assert (full[1] - full[0]) - (lean[1] - lean[0]) == table
    whole = plan(tmp_path, "0.1b")
    lora = plan(tmp_path, "0.1b", actor_rollout_ref__model__lora_rank=8)
    per_token = 30 * 2 * 7 * 8
    tokens = 25 * 639
    assert lora.largest("actor activations") - whole.largest("actor activations") == per_token * tokens


def test_captured_steps_hold_float32_logits_of_the_largest_graph():
    few, more, least = (cuda_bytes.captured_bytes(SIZES, rows, 64, hopper=False) for rows in (33, 48, 32))
    assert few == more, "33 rows run in the graph of 48"
    assert more - least == more // 3
    assert more > 48 * 4 * 100


def test_captured_steps_of_many_rows_on_hopper_hold_the_logits_of_graphs_of_few_rows():
    sizes = replace(SIZES, width=64)

    def logits(of: cuda_bytes.Sizes, rows: int) -> int:
        """Rows of them, of all that is held."""
        held = [cuda_bytes.captured_bytes(of, rows, 64, hopper=hopper) for hopper in (False, True)]
        return bucket(rows) - (held[0] - held[1]) // (4 * 100)

    assert [logits(sizes, rows) for rows in (5, 96, 97, 128, 1024)] == [8, 96, 96, 96, 96]
    assert [logits(other, 1024) for other in (SIZES, replace(sizes, bare_head=False))] == [1024, 1024]


def test_a_head_with_adapters_writes_its_logits(tmp_path):
    whole: dict[str, Any] = {"actor_rollout_ref__model__target_modules": "[q_proj,lm_head]"}
    plain, adapted = (plan(tmp_path, "0.5b", **LORA, **more).largest(CAPTURED) for more in ({}, whole))
    assert adapted - plain == (512 - 96) * 4 * 151936


def test_captured_steps_are_counted_with_the_sizes_of_the_kernels():
    """The rows' buffers import Triton: how many columns they have is read from their source."""
    source = Path(cuda_bytes.__file__).parent.parent / "kernels" / "cuda" / "graphs.py"
    known: dict[str, Any] = {"torch": torch}
    for line in ast.parse(source.read_text()).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Tuple):
            exec(ast.unparse(line), known)
    one, two = (cuda_bytes.captured_bytes(SIZES, rows, 64, hopper=True) for rows in (32, 64))
    numbers = 4 * len(known["_INTS"]) + 8 * len(known["_LONGS"]) + sum(kind.itemsize for kind in known["_SEEN"])
    each = numbers + 8 * MOST_TOKENS + 4 * 4 + 8 * 2 + SIZES.passing + 4 * SIZES.vocabulary
    assert two - one == 32 * each


def test_a_model_that_the_kernels_do_not_serve_is_counted_by_its_own_code(tmp_path):
    plain, other = plan(tmp_path, "0.1b"), plan(tmp_path, "0.1b", actor_rollout_ref__model__dtype="float32")
    assert CAPTURED in plain.stages["update"] and CAPTURED not in other.stages["update"]


def test_the_plan_counts_the_prompt_tokens_that_a_step_takes_on_a_gpu(tmp_path):
    wide = {"data__max_prompt_length": 1024}

    def temporary(**more: Any) -> int:
        return plan(tmp_path, "0.5b", **wide, **more).stages["generate"]["temporary tensors"]

    fewer, more = (temporary(actor_rollout_ref__rollout__max_num_batched_tokens=tokens) for tokens in (8192, 16384))
    assert fewer < temporary() == more
