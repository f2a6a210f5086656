"""verl's helpers on small cases. (All of it holds for verl 0.9.1 as well, but for what is marked.)"""

import json
import os
import types

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from verl import DataProto
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.utils import Role, WorkerType, create_rl_sampler, need_critic, need_reference_policy
from verl.utils import as_torch_index, fs, group_mean_std, hdfs_io, hf_processor, hf_tokenizer, omega_conf_to_dataclass
from verl.utils import seqlen_balancing as balancing
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.device import (
    get_device_id,
    get_device_name,
    get_nccl_backend,
    get_torch_device,
    is_cuda_available,
)
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.model import compute_position_id_with_mask, create_random_mask
from verl.utils.profiler import simple_timer
from verl.utils.py_functional import append_to_dict, rename_dict, union_two_dict
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.tracking import Tracking

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
VALUES = torch.tensor([[1.0, 2.0, 6.0, 9.0], [3.0, 8.0, 9.0, 9.0]])


def test_masked_statistics():
    assert verl_F.masked_mean(VALUES, MASK) == pytest.approx(4.0)
    assert verl_F.masked_mean(VALUES, MASK, axis=-1).tolist() == pytest.approx([3.0, 5.5])
    assert verl_F.masked_sum(VALUES, MASK) == 20 and verl_F.masked_var(VALUES, MASK) == pytest.approx(8.5)
    whitened = verl_F.masked_whiten(VALUES, MASK)
    assert whitened[0].tolist()[:3] == pytest.approx([-1.0290, -0.6860, 0.6860], abs=1e-4)
    assert verl_F.masked_whiten(VALUES, MASK, shift_mean=False)[0, 0] == pytest.approx(2.9710, abs=1e-4)
    with pytest.raises(ValueError):
        verl_F.masked_var(VALUES, torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]]))


def test_log_probs_entropy_and_masks_of_logits():
    logits = torch.arange(12, dtype=torch.float32).reshape(1, 3, 4).sin()
    labels = torch.tensor([[0, 3, 2]])
    assert verl_F.logprobs_from_logits(logits, labels)[0].tolist() == pytest.approx(
        [-1.9393, -0.6065, -2.1826], abs=1e-4
    )
    assert verl_F.entropy_from_logits(logits)[0].tolist() == pytest.approx([1.3106, 1.1692, 1.1336], abs=1e-4)
    assert verl_F.calculate_sum_pi_squared_from_logits(logits)[0, 0] == pytest.approx(0.28684, abs=1e-4)
    ids = torch.tensor([[20, 10, 34, 1, 0, 0], [78, 0, 76, 2, 1, 0]])
    assert verl_F.get_response_mask(ids, eos_token=[1, 2]).tolist() == [[1, 1, 1, 1, 0, 0]] * 2
    assert verl_F.pad_2d_list_to_length([[1], [2, 3]], 9, max_length=3).tolist() == [[1, 9, 9], [2, 3, 9]]
    assert verl_F.pad_sequence_to_length(torch.tensor([[1, 2]]), 4, 0, left_pad=True).tolist() == [[0, 0, 1, 2]]
    assert verl_F.clip_by_value(torch.tensor([0.0, 5.0]), torch.tensor([1.0]), torch.tensor([2.0])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", [2, 3, 4]), ("right", [1, 2, 3]), ("middle", [1, 3, 4]), ("error", None)]
)
def test_rows_are_padded_and_cut(truncation, kept):
    ids = torch.tensor([[1, 2, 3, 4]])
    padded, mask = verl_F.postprocess_data(ids, torch.ones_like(ids), 5, 0, left_pad=True, truncation=truncation)
    assert padded.tolist() == [[0, 1, 2, 3, 4]] and mask.tolist() == [[0, 1, 1, 1, 1]]
    if kept is None:
        with pytest.raises(NotImplementedError):
            verl_F.postprocess_data(ids, torch.ones_like(ids), 3, 0, truncation=truncation)
    else:
        assert verl_F.postprocess_data(ids, torch.ones_like(ids), 3, 0, truncation=truncation)[0].tolist() == [kept]


def test_schedules():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rates = []
    schedule = verl_F.get_cosine_schedule_with_warmup(optimizer, 2, 6, min_lr_ratio=0.1)
    for _ in range(7):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1], abs=1e-4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert verl_F.get_constant_schedule_with_warmup(optimizer, 0).get_last_lr() == [1.0]


def test_partitions_are_balanced():
    lengths = [10, 7, 5, 5, 4, 3, 2]
    parts = balancing.get_seqlen_balanced_partitions(lengths, 3, equal_size=False)
    assert sorted(sum(lengths[row] for row in part) for part in parts) == [11, 12, 13]
    assert all(part == sorted(part) for part in parts)
    parts = balancing.get_seqlen_balanced_partitions([9, 1, 8, 2, 7, 3], 3, equal_size=True)
    assert sorted(map(sorted, parts)) == [[0, 1], [2, 3], [4, 5]]
    stats = balancing.log_seqlen_unbalance([9, 1, 8, 2, 7, 3], parts, "tokens")
    assert stats["tokens/balanced_max"] == 10 and stats["tokens/max"] == 10 and stats["tokens/mean"] == 10
    with pytest.raises(AssertionError):
        balancing.get_seqlen_balanced_partitions([1], 2, equal_size=False)


def test_micro_batches_stay_below_their_tokens_and_can_be_undone():
    lengths = [7, 3, 5, 2, 6, 4]
    mask = torch.tensor([[1] * n + [0] * (8 - n) for n in lengths])
    batch = TensorDict({"input_ids": torch.arange(48).reshape(6, 8), "attention_mask": mask}, [6])
    micro, rows = balancing.rearrange_micro_batches(batch, max_token_len=10)
    assert sorted(row for part in rows for row in part) == list(range(6))
    assert all(int(part["attention_mask"].sum()) <= 10 for part in micro)
    joined = torch.cat([part["input_ids"] for part in micro])
    assert torch.equal(balancing.restore_dynamic_batch(joined, rows), batch["input_ids"])
    assert len(balancing.rearrange_micro_batches(batch, 100, min_num_micro_batch=3)[0]) == 3
    grouped = balancing.rearrange_micro_batches(batch, 20, force_group_size=2)[1]
    assert all(part[0] % 2 == 0 and part[1] == part[0] + 1 for part in grouped)
    data = DataProto(batch, {"name": np.array(list("abcdef"), dtype=object)}, {"k": 1})
    parts, rows = balancing.prepare_dynamic_batch(data, 10)
    assert [part.non_tensor_batch["name"].tolist() for part in parts] == [
        ["abcdef"[row] for row in own] for own in rows
    ]
    assert (balancing.ceildiv(7, 3), balancing.roundup_divisible(7, 4)) == (3, 8)


def test_tensordicts_with_lists_values_and_ragged_rows():
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3), torch.arange(1)], layout=torch.jagged)
    td = tu.get_tensordict({"x": torch.arange(3), "ids": ragged, "turns": [[], [1], [2, 3]]}, {"lr": 0.1})
    assert tu.get(td, "turns") == [[], [1], [2, 3]] and tu.get(td, "lr") == 0.1 and tu.get(td, "no", 5) == 5
    some = tu.index_select_tensor_dict(td, [2, 0])
    assert tu.get(some, "turns") == [[2, 3], []] and [len(row) for row in some["ids"].unbind()] == [1, 2]
    assert tu.get(some, "lr") == 0.1
    parts = tu.chunk_tensordict(td, 3)
    assert [len(part) for part in parts] == [1, 1, 1]
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), td)
    with pytest.raises(AssertionError):
        tu.assert_tensordict_eq(parts[0], parts[1])
    assert set(tu.get_keys(td, ["x", "lr"]).keys()) == {"x", "lr"}
    assert tu.pop(td, "x").tolist() == [0, 1, 2] and tu.get(td, "x") is None
    with pytest.raises(KeyError):
        tu.pop_keys(td, ["x"])
    plain = tu.get_tensordict({"a": torch.arange(3)})
    tu.assign_non_tensor(plain, name="n", rows=["p", "q", "r"])
    padded, added = tu.pad_to_divisor(tu.get_keys(plain, ["a"]), 2)
    assert added == 1 and padded["a"].tolist() == [0, 1, 2, 0] and tu.unpad(padded, 1)["a"].tolist() == [0, 1, 2]
    assert [tu.get(part, "rows") for part in tu.make_iterator(plain, 1, epochs=1)] == [["p"], ["q"], ["r"]]


def test_metrics_are_reduced_by_their_names():
    metrics = {"loss": [1.0, 3.0], "reward/max": [1.0, 3.0], "len/min": [4, 2], "m": Metric("sum", 1.0)}
    metrics["m"].append(2.0)
    assert reduce_metrics(metrics) == {"loss": 2.0, "reward/max": 3.0, "len/min": 2, "m": 3.0}
    assert metrics["loss"] == 2.0
    assert Metric.aggregate_dp([Metric("mean", 1.0), Metric("mean", 3.0)]) == 2.0


def test_dicts():
    into = {}
    append_to_dict(into, {"a": 1, "b": [2, 3]}, prefix="x/")
    append_to_dict(into, {"a": 4})
    assert into == {"x/a": [1], "x/b": [2, 3], "a": [4]}
    assert rename_dict({"a": 1, "x/b": 2}, "x/") == {"x/a": 1, "x/b": 2}
    assert union_two_dict({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError):
        union_two_dict({"a": 1}, {"a": 2})


def test_timers_add_up():
    times = {"gen": 1.0}
    with marked_timer("gen", times, color="red"), simple_timer("step", times):
        pass
    assert 1.0 < times["gen"] < 2.0 and 0 < times["step"] < 1.0


def test_devices():  # on a CPU verl 0.9 says `cuda`, 0.7 `cpu`
    assert is_cuda_available == torch.cuda.is_available()
    assert get_device_name() == ("cuda" if is_cuda_available else "cpu")
    assert get_nccl_backend() == ("nccl" if is_cuda_available else "gloo")
    assert hasattr(get_torch_device(), "is_available") and get_device_id() in (0, "cpu")


def test_positions_and_masks():
    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1, 0]])).tolist() == [[0, 0, 0, 1, 1]]
    mask = create_random_mask(torch.zeros(20, 10), 0.8, 0.2, 0.5)
    assert mask.shape == (20, 10) and int(mask.sum(1).min()) >= 5 and int(mask.sum(1).max()) <= 8
    assert PrecisionType.to_dtype("bf16") is torch.bfloat16 and PrecisionType.to_str(torch.float16) == "fp16"
    with pytest.raises(RuntimeError):
        PrecisionType.to_dtype("int3")


def test_groups():
    index = as_torch_index(np.array(["a", "b", "a"], dtype=object))
    assert index.tolist() == [0, 1, 0]
    mean, deviation, count = group_mean_std(torch.tensor([1.0, 5.0, 3.0]), index)
    assert (mean.tolist(), count.tolist()) == ([2.0, 0.0], [2.0, 1.0]) and deviation.tolist() == pytest.approx(
        [2**0.5, 1]
    )


def test_files(tmp_path):
    hdfs_io.makedirs(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "x").write_text("1")
    assert hdfs_io.copy(str(tmp_path / "a" / "x"), str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b" / "x")
    hdfs_io.copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert hdfs_io.exists(str(tmp_path / "c" / "b" / "x")) and not hdfs_io.exists(str(tmp_path / "d"))
    assert (
        fs.copy_to_local(str(tmp_path / "a")) == str(tmp_path / "a")
        and fs.copy_to_local("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    )
    assert fs.is_non_local("hdfs://x/y") and os.path.isdir(fs.local_mkdir_safe(str(tmp_path / "e" / "f")))
    assert find_latest_ckpt_path(str(tmp_path)) is None and find_latest_ckpt_path(None) is None
    (tmp_path / "global_step_20").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_20")


def test_tracking_writes_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    tracking = Tracking("p", "e", default_backend=["console", "file"], config={"a": 1})
    tracking.log(data={"loss": 0.5}, step=3)
    tracking.finish()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "data": {"loss": 0.5}}
    assert "step:3 - loss:0.5" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="is not supported"):
        Tracking("p", "e", default_backend=["pigeon"])


def test_rows_become_a_batch():
    rows = [{"t": torch.tensor([1]), "m": [1, 2]}, {"t": torch.tensor([2]), "m": [3]}]
    batch = collate_fn(rows)
    assert batch["t"].tolist() == [[1], [2]] and batch["m"].dtype == object and batch["m"].tolist() == [[1, 2], [3]]


def settings(**more):
    sections = {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "actor_rollout_ref": {"actor": {"use_kl_loss": False}},
        "critic": {"enable": None},
        "data": {"shuffle": True, "seed": 7},
    }
    return OmegaConf.merge(OmegaConf.create(sections), OmegaConf.create(more))


@pytest.mark.filterwarnings("ignore")
def test_roles_and_who_needs_them():
    assert (
        str(Role.ActorRollout) == "actor_rollout"
        and str(Role.RefPolicy) == "ref"
        and Role.from_string("rm") is Role.RewardModel
    )
    assert WorkerType is not None
    assert not need_critic(settings()) and need_critic(settings(critic={"enable": True}))
    assert need_critic(settings(algorithm={"adv_estimator": "gae"}))
    assert not need_reference_policy(settings()) and need_reference_policy(
        settings(algorithm={"use_kl_in_reward": True})
    )
    order = list(create_rl_sampler(settings().data, range(5)))
    assert sorted(order) == [0, 1, 2, 3, 4] and order == list(create_rl_sampler(settings().data, range(5)))
    assert list(create_rl_sampler(OmegaConf.create({"shuffle": False}), range(3))) == [0, 1, 2]


def test_sections_become_objects():
    made = omega_conf_to_dataclass(OmegaConf.create({"_target_": "types.SimpleNamespace", "x": 1}))
    assert made == types.SimpleNamespace(x=1)
    assert omega_conf_to_dataclass({}, None) is None and omega_conf_to_dataclass(made) is made
    assert "env_vars" in get_ppo_ray_runtime_env()


def scored():
    rows, width = 3, 4
    responses = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    scores = torch.zeros(rows, width)
    scores[0, 3], scores[1, 1] = 1.0, -1.0
    tensors = {
        "prompts": torch.zeros(rows, 2, dtype=torch.long),
        "responses": responses,
        "attention_mask": torch.cat([torch.tensor([[1, 1], [0, 1], [1, 1]]), mask], dim=1),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores * 2,
        "advantages": scores + 0.5,
        "returns": scores,
        "values": scores * 0.5,
        "rollout_log_probs": -torch.ones(rows, width),
        "old_log_probs": -torch.arange(12).reshape(rows, width) / 6,
    }
    return DataProto.from_dict(tensors, meta_info={"global_token_num": [6, 3, 2]})


def test_metrics_of_a_batch():
    metrics = metric_utils.compute_data_metrics(scored())
    assert (
        metrics["critic/score/mean"] == 0 and metrics["critic/rewards/max"] == 2 and metrics["critic/score/min"] == -1
    )
    assert metrics["response_length/mean"] == 2 and metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 3 and metrics["response/aborted_ratio"] == pytest.approx(
        1 / 3
    )
    assert metrics["prompt_length/min"] == 1 and metrics["critic/advantages/mean"] == 0.5
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75, abs=1e-4)
    assert "critic/values/mean" not in metric_utils.compute_data_metrics(scored(), use_critic=False)
    times = metric_utils.compute_timing_metrics(scored(), {"gen": 0.6, "adv": 1.1, "other": 2.0})
    assert times["timing_per_token_ms/gen"] == pytest.approx(100) and times["timing_per_token_ms/adv"] == pytest.approx(
        100
    )
    assert times["timing_s/other"] == 2.0 and "timing_per_token_ms/other" not in times
    rates = metric_utils.compute_throughout_metrics(scored(), {"step": 2.0}, n_gpus=2)
    assert rates == {"perf/total_num_tokens": 11, "perf/time_per_step": 2.0, "perf/throughput": 2.75}


def test_metrics_of_a_validation():
    infos = {"score": [1.0, 0.0, 0.5, 0.5], "pred": ["a", "b", "c", "c"], "text": ["x"] * 4}
    found = metric_utils.process_validation_metrics(["s"] * 4, ["u", "u", "v", "v"], infos)["s"]
    assert set(found) == {"score"} and found["score"]["mean@2"] == 0.5 and found["score"]["std@2"] == 0.25
    assert found["score"]["best@2/mean"] == pytest.approx(0.635, abs=1e-6)
    assert found["score"]["maj@2/mean"] == pytest.approx(0.5, abs=0.02)
    assert metric_utils.calc_maj_val([{"p": "a", "v": 1}, {"p": "b", "v": 2}, {"p": "b", "v": 3}], "p", "v") == 2


def test_rollout_and_trainer_compared():
    found = calculate_debug_metrics(scored())
    assert found["training/rollout_probs_diff_valid"] == 1
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.63212, abs=1e-4)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.31838, abs=1e-4)


def test_tokenizers(tiny_model):
    tokenizer = hf_tokenizer(str(tiny_model))
    assert tokenizer.pad_token_id is not None and tokenizer.decode(tokenizer("ab")["input_ids"]).startswith("ab")
    assert hf_processor(str(tiny_model)) is None
