"""Names beyond the most imported ones: each does what verl's does, held to a formula of its own."""

from __future__ import annotations

import asyncio
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from posttrain.config.compose import PACKAGE_TREE
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import NaiveRewardManager, get_reward_manager_cls, register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase, WholeBatch
from verl.protocol import (
    deserialize_single_tensor,
    deserialize_tensordict,
    fold_batch_dim,
    serialize_single_tensor,
    serialize_tensordict,
    unfold_batch_dim,
)
from verl.single_controller.base import Worker
from verl.tools.function_tool import (
    FUNCTION_TOOL_REGISTRY,
    function_tool,
    get_function_tool,
    load_function_tools_from_path,
    normalize_function_tool_return,
)
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils.reward_score import gsm8k_reward
from verl.utils.seqlen_balancing import get_group_balanced_partitions
from verl.utils.torch_functional import distributed_masked_mean
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine, FSDPEngine

ROOT = Path(__file__).resolve().parents[2]


# -- algorithms ------------------------------------------------------------------------------------------------------


def test_kl_divergence_by_its_formulas():
    log_prob, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    gap = ref - log_prob
    k3 = gap.exp() - gap - 1
    assert torch.allclose(core_algos.compute_kl_divergence(log_prob, ref, type="low_var_kl"), k3)
    assert torch.allclose(core_algos.compute_kl_divergence(log_prob, ref, type="kl"), -gap)
    assert torch.allclose(core_algos.compute_kl_divergence(log_prob, ref), k3)


def test_the_registry_at_verls_address_is_the_one_that_counts(monkeypatch):
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", {"gae": len})
    assert core_algos.get_adv_estimator_fn("gae") is len

    @core_algos.register_adv_est("mine")
    def mine(token_level_rewards, response_mask, **kwargs):
        return token_level_rewards, token_level_rewards

    assert {"gae": len, "mine": mine} == core_algos.ADV_ESTIMATOR_REGISTRY
    core_algos.ADV_ESTIMATOR_REGISTRY.clear()
    with pytest.raises(ValueError, match="Unknown advantage estimator simply: gae"):
        core_algos.get_adv_estimator_fn("gae")


def test_unknown_names_are_answered_in_verls_words():
    with pytest.raises(ValueError, match=r"Unknown advantage estimator simply: gea\..*Known: .*gae"):
        core_algos.get_adv_estimator_fn("gea")
    with pytest.raises(ValueError, match=r"Unsupported loss mode: vanila\. Supported modes are: \[.*'vanilla'"):
        core_algos.get_policy_loss_fn("vanila")


def test_every_rule_of_rejection_that_is_named_is_taken():
    assert (
        len(SUPPORTED_ROLLOUT_RS_OPTIONS) == 11
        and {
            "token_k1",
            "token_k2",
            "token_k3",
        }
        == TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    )
    for rule in SUPPORTED_ROLLOUT_RS_OPTIONS:
        threshold = "0.5_2.0" if rule.endswith("k1") else 1.0
        mask, _ = compute_rollout_rejection_mask(torch.zeros(2, 3), torch.ones(2, 3), rule, threshold)
        assert mask.sum() == 6, rule


# -- workers ---------------------------------------------------------------------------------------------------------


def test_settings_and_engines_stand_at_verls_addresses():
    assert AlgoConfig(gamma=0.5).gamma == 0.5
    assert ActorConfig(ppo_epochs=3).ppo_epochs == 3 and PolicyLossConfig().loss_mode == "vanilla"
    assert issubclass(FSDPEngine, BaseEngine) and inspect.isabstract(BaseEngine)


class Table(torch.nn.Module):
    """Logits of the next token by the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 25).reshape(5, 5))

    def forward(self, input_ids, attention_mask, use_cache, position_ids=None):
        return SimpleNamespace(logits=self.table[input_ids])


def batch(rows: int = 4) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (rows, 5), generator=draw)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])[:rows]
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.cat([torch.ones(rows, 2, dtype=torch.long), mask], 1),
        "responses": ids[:, 2:],
        "response_mask": mask,
        "old_log_probs": torch.randn(rows, 3, generator=draw) * 0.1 - 1.5,
        "ref_log_prob": torch.randn(rows, 3, generator=draw) * 0.1 - 1.4,
        "advantages": torch.randn(rows, 3, generator=draw),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 2.0, "micro_batch_size": 3})


def settings(**more) -> ActorConfig:
    given = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": None, "use_kl_loss": True, "kl_loss_coef": 0.3}
    return ActorConfig(**{**given, "entropy_coeff": 0.2, "clip_ratio": 0.1, "grad_clip": 1e9, **more})


def by_hand(model: Table, data: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropy, the loss of the whole batch), written out."""
    logits = model.table[data.batch["input_ids"]][:, 1:-1] / 2.0
    whole = logits.log_softmax(-1)
    log_prob = whole.gather(-1, data.batch["responses"][..., None])[..., 0]
    entropy = -(whole.exp() * whole).sum(-1)
    ratio = (log_prob - data.batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * data.batch["advantages"], ratio.clamp(0.9, 1.1) * data.batch["advantages"])
    bounded = torch.where(data.batch["advantages"] < 0, torch.maximum(gain, 3.0 * data.batch["advantages"]), gain)
    gap = data.batch["ref_log_prob"] - log_prob
    each = -bounded - 0.2 * entropy + 0.3 * (gap.exp() - gap - 1)
    mask = data.batch["response_mask"]
    return log_prob, entropy, (each * mask).sum() / mask.sum()


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_the_actors_update_is_the_gradient_of_the_formula_however_it_is_cut(rows):
    model, data = Table(), batch()
    wanted = by_hand(model, data)
    (gradient,) = torch.autograd.grad(wanted[2], model.table)
    start = model.table.detach().clone()
    actor = DataParallelPPOActor(
        settings(ppo_micro_batch_size_per_gpu=rows), model, torch.optim.SGD(model.parameters(), lr=0.5)
    )
    log_prob, entropy = actor.compute_log_prob(data, calculate_entropy=True)
    assert torch.allclose(log_prob, wanted[0], atol=1e-6) and torch.allclose(entropy, wanted[1], atol=1e-6)
    assert actor.compute_log_prob(data)[1] is None
    metrics = actor.update_policy(data)
    assert torch.allclose(model.table, start - 0.5 * gradient, atol=1e-6)
    assert metrics["actor/grad_norm"] == [pytest.approx(float(gradient.norm()), rel=1e-4)]
    assert sum(metrics["actor/kl_loss"]) > 0


def test_the_actor_leaves_out_a_step_that_is_not_finite():
    model, data = Table(), batch()
    data.batch["advantages"][0, 0] = math.inf
    start = model.table.detach().clone()
    DataParallelPPOActor(settings(), model, torch.optim.SGD(model.parameters(), lr=1.0)).update_policy(data)
    assert torch.equal(model.table, start)


# -- batches ---------------------------------------------------------------------------------------------------------


def test_log_probs_are_also_read_by_the_names_of_guides():
    data = batch()
    for there in (data, data[:2], data[[3, 0]], DataProto.concat([data, data])):
        assert there.batch["log_probs"] is there.batch["old_log_probs"] or torch.equal(
            there.batch["log_probs"], there.batch["old_log_probs"]
        )
        assert torch.equal(there.batch["ref_log_probs"], there.batch["ref_log_prob"])
    data.batch["log_probs"] = torch.zeros(4, 3)  # a tensor of that name is itself
    assert data.batch["log_probs"].sum() == 0 and data.batch["old_log_probs"].sum() != 0
    with pytest.raises(KeyError):
        DataProto.from_dict({"a": torch.zeros(1)}).batch["log_probs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_told_as_bytes_and_back(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    told = serialize_single_tensor(tensor)
    assert told[:2] == (str(dtype).removeprefix("torch."), (2, 3)) and len(bytes(told[2])) == 6 * tensor.element_size()
    back = deserialize_single_tensor(told)
    assert back.dtype == dtype and torch.equal(back, tensor)
    assert deserialize_single_tensor(serialize_single_tensor(tensor[:0])).shape == (0, 3)


def test_whole_batches_are_told_with_nested_tensors():
    nested = torch.nested.as_nested_tensor([torch.arange(3.0), torch.arange(1.0)], layout=torch.jagged)
    data = DataProto.from_dict({"a": torch.ones(2, 2)}).batch
    data["n"] = nested
    back = deserialize_tensordict(serialize_tensordict(data))
    assert torch.equal(back["a"], data["a"]) and [len(part) for part in back["n"].unbind()] == [3, 1]


def test_rows_are_folded_and_unfolded():
    data = DataProto.from_dict({"a": torch.arange(12.0).reshape(6, 2)}, {"n": list("abcdef")})
    folded = fold_batch_dim(data, 3)
    assert folded.batch["a"].shape == (3, 2, 2) and folded.non_tensor_batch["n"].tolist()[1] == ["c", "d"]
    back = unfold_batch_dim(folded)
    assert torch.equal(back.batch["a"], data.batch["a"]) and back.non_tensor_batch["n"].tolist() == list("abcdef")


def test_a_worker_takes_over_anothers_place_in_a_mesh():
    other, worker = Worker(), Worker()
    other._register_dispatch_collect_info(mesh_name="actor", dp_rank=1, is_collect=False)
    worker.set_dispatch_collect(mesh_name="ref", **other.get_dispatch_collect())
    assert worker._query_dispatch_info("ref") == 1 and not worker._query_collect_info("ref")
    with pytest.raises(AssertionError, match="ref has been registered"):
        worker.set_dispatch_collect(mesh_name="ref", **other.get_dispatch_collect())


def test_the_spread_of_importance_weights_by_hand():
    ratio = torch.tensor([[1.0, 6.0, 0.1], [0.9, 1.1, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    weights, told = compute_rollout_correction_weights(ratio.log(), mask, "token", 2.0)
    kept = [1.0, 2.0, 0.1, 0.9, 1.1]
    assert torch.allclose(weights, torch.tensor([[1.0, 2.0, 0.1], [0.9, 1.1, 0.0]]))
    assert told["rollout_is_mean"] == pytest.approx(np.mean(kept)) and told["rollout_is_max"] == pytest.approx(2.0)
    assert told["rollout_is_std"] == pytest.approx(np.std(kept), rel=1e-5)
    assert told["rollout_is_ratio_fraction_high"] == pytest.approx(0.2)
    assert told["rollout_is_ratio_fraction_low"] == pytest.approx(0.2)  # below 1 / 2
    assert told["rollout_is_eff_sample_size"] == pytest.approx(np.mean(kept) ** 2 / np.mean(np.square(kept)), rel=1e-5)
    assert told["rollout_is_seq_fraction_high"] == 0.5, "by the ratios before bounding: 7.1 / 3"
    with pytest.raises(TypeError, match="not a boolean"):
        compute_rollout_correction_weights(ratio.log(), mask, "token", True)


def test_the_masked_mean_of_one_process():
    values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 0.0])
    assert distributed_masked_mean(values, mask) == 1.5


def test_groups_stay_together_and_parts_have_equally_many():
    lengths, uids = [10, 10, 500, 500, 20, 20, 490, 490], list("aabbccdd")
    parts = get_group_balanced_partitions(lengths, uids, 2)
    assert sorted(row for part in parts for row in part) == list(range(8)) and [len(part) for part in parts] == [4, 4]
    for part in parts:
        assert {uids[row] for row in part} not in ({"b", "d"}, {"a", "c"}), "the two long groups are apart"
    with pytest.raises(AssertionError, match="must be >= k_partitions"):
        get_group_balanced_partitions([1, 2], ["a", "a"], 2)


# -- rewards and tools -----------------------------------------------------------------------------------------------


def test_gsm8k_reward_is_found_where_guides_name_it():
    assert gsm8k_reward("so #### 42", "42") == 1.0 and gsm8k_reward("so #### 41", "42") == 0.0
    assert gsm8k_reward(data_source="gsm8k", solution_str="#### 42", ground_truth="42", extra_info=None) == 1.0


class Letters:
    """Tokens are letters: 1 is A."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(64 + int(i)) for i in ids)


def scored_rows() -> DataProto:
    responses = torch.tensor([[1, 2, 0], [3, 3, 3]])
    attention = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    fields = {
        "data_source": ["x", "x"],
        "reward_model": [{"ground_truth": "AB"}, {"ground_truth": "AB"}],
        "extra_info": [{"k": 1}, {"k": 2}],
    }
    arrays = {name: np.array(values, dtype=object) for name, values in fields.items()}
    prompts = torch.ones(2, 2, dtype=torch.long)
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "attention_mask": attention}, arrays)


async def judged(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "k": extra_info["k"]}


@pytest.mark.parametrize("is_async", [True, False])
def test_a_manager_of_single_responses_scores_one_and_a_batch(is_async):
    function = judged if is_async else (lambda **given: asyncio.run(judged(**given)))
    manager = NaiveRewardManager(OmegaConf.create({}), Letters(), function)
    one = asyncio.run(manager.run_single(scored_rows()[:1]))
    assert one == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "length": 2, "k": 1}}
    told = WholeBatch(manager)(scored_rows(), return_dict=True)
    assert told["reward_tensor"].tolist() == [[0, 1, 0], [0, 0, 0]] and told["reward_extra_info"]["k"] == [1, 2]


def test_dapos_manager_takes_off_what_is_too_long():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0, "log": True}
    config = OmegaConf.create({"reward": {"reward_kwargs": {"max_resp_len": 4, "overlong_buffer_cfg": buffer}}})
    manager = get_reward_manager_cls("dapo")(config, Letters(), judged)
    told = WholeBatch(manager)(scored_rows(), return_dict=True)
    assert told["reward_tensor"].tolist() == [[0, 1, 0], [0, 0, -0.5]]  # 3 tokens of 4, of which 2 are the buffer
    assert told["reward_extra_info"]["overlong"] == [False, True]


def test_managers_of_ones_own_are_found_by_name():
    @register("of_test")
    class Mine(RewardManagerBase):
        async def run_single(self, data):
            return {"reward_score": 0.5, "reward_extra_info": {}}

    assert get_reward_manager_cls("of_test") is Mine
    with pytest.raises(ValueError, match="Unknown reward manager: none"):
        get_reward_manager_cls("none")
    assert WholeBatch(Mine(None, None, None))(scored_rows())[1].tolist() == [0, 0, 0.5]


def test_functions_become_tools(tmp_path):
    @function_tool
    def add(a: int, b: int = 1) -> int:
        """Adds.

        Args:
            a: the first
            b: the second
        """
        return a + b

    tool = get_function_tool("add")
    schema = tool.tool_schema.model_dump(exclude_none=True)["function"]
    assert schema["name"] == "add" and set(schema["parameters"]["properties"]) == {"a", "b"}
    assert schema["parameters"]["required"] == ["a"]
    assert asyncio.run(tool.call({"a": 2, "b": 3})) == 5
    with pytest.raises(ValueError, match="already registered"):
        function_tool("add", schema=schema_of("add"))(lambda: 1)
    with pytest.raises(KeyError, match="not found in registry"):
        get_function_tool("subtract")
    file = tmp_path / "tools.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool('twice')\n"
        'async def double(x: float) -> float:\n    """Twice.\n\n    Args:\n        x: what\n    """\n    return 2 * x\n'
    )
    (twice,) = load_function_tools_from_path(str(file))
    assert twice.name == "twice" and asyncio.run(twice.call({"x": 2})) == 4
    assert load_function_tools_from_path(str(file)) == [twice]
    with pytest.raises(FileNotFoundError):
        load_function_tools_from_path(str(tmp_path / "none.py"))
    del FUNCTION_TOOL_REGISTRY["add"], FUNCTION_TOOL_REGISTRY["twice"]


def schema_of(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def test_what_a_function_returns_is_an_answer_a_reward_and_metrics():
    assert normalize_function_tool_return("a")[0].text == "a"
    assert normalize_function_tool_return({"é": 1})[0].text == '{"é": 1}'
    response, reward, metrics = normalize_function_tool_return(("a", 0, None))
    assert (response.text, reward, metrics) == ("a", 0.0, {})
    assert normalize_function_tool_return((1, 2, {"m": 3}))[1:] == (2.0, {"m": 3})
    with pytest.raises(TypeError, match="length 1, 2, or 3"):
        normalize_function_tool_return(())


@pytest.mark.parametrize("name", ["ppo_trainer.yaml", "sft_trainer.yaml"])
def test_main_files_to_copy_are_posttrains(name):
    ours = PACKAGE_TREE / name
    copy = ROOT / "compat" / "verl" / "trainer" / "config" / name
    assert copy.read_text() == ours.read_text(), f"cp {ours} {copy}"
