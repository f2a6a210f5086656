"""The 60 names that other people's code imports most from verl, and what has no place in another file."""

import importlib
import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from posttrain.config import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.utils import hf_tokenizer
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset

README = (Path(__file__).resolve().parents[2] / "compat" / "README.md").read_text()
NAMES = (
    "verl.DataProto",
    "verl.single_controller.ray.RayWorkerGroup",
    "verl.trainer.ppo.utils.Role",
    "verl.utils.hdfs_io.makedirs",
    "verl.utils.hdfs_io.copy",
    "verl.utils.hf_tokenizer",
    "verl.trainer.ppo.ray_trainer.ResourcePoolManager",
    "verl.utils.fs.copy_to_local",
    "verl.utils.hf_processor",
    "verl.utils.metric.reduce_metrics",
    "verl.utils.tracking.Tracking",
    "verl.utils.debug.marked_timer",
    "verl.utils.device.get_device_name",
    "verl.utils.dataset.rl_dataset.collate_fn",
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer",
    "verl.single_controller.base.decorator.register",
    "verl.single_controller.base.decorator.Dispatch",
    "verl.trainer.ppo.utils.need_reference_policy",
    "verl.trainer.ppo.core_algos.agg_loss",
    "verl.utils.config.omega_conf_to_dataclass",
    "verl.single_controller.ray.RayClassWithInitArgs",
    "verl.utils.torch_functional",
    "verl.utils.device.get_device_id",
    "verl.trainer.ppo.utils.WorkerType",
    "verl.workers.fsdp_workers.ActorRolloutRefWorker",
    "verl.workers.fsdp_workers.RewardModelWorker",
    "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
    "verl.trainer.ppo.metric_utils.compute_timing_metrics",
    "verl.trainer.ppo.metric_utils.compute_throughout_metrics",
    "verl.workers.megatron_workers.RewardModelWorker",
    "verl.utils.device.get_torch_device",
    "verl.trainer.ppo.core_algos.AdvantageEstimator",
    "verl.trainer.ppo.ray_trainer.compute_response_mask",
    "verl.workers.megatron_workers.ActorRolloutRefWorker",
    "verl.trainer.ppo.utils.need_critic",
    "verl.utils.device.is_cuda_available",
    "verl.utils.dataset.rl_dataset.RLHFDataset",
    "verl.single_controller.ray.base.create_colocated_worker_cls",
    "verl.utils.config.validate_config",
    "verl.trainer.ppo.ray_trainer.compute_advantage",
    "verl.utils.tensordict_utils",
    "verl.protocol.pad_dataproto_to_divisor",
    "verl.trainer.ppo.metric_utils.compute_data_metrics",
    "verl.workers.fsdp_workers.CriticWorker",
    "verl.workers.megatron_workers.CriticWorker",
    "verl.utils.model.compute_position_id_with_mask",
    "verl.trainer.constants_ppo.get_ppo_ray_runtime_env",
    "verl.utils.py_functional.append_to_dict",
    "verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path",
    "verl.utils.torch_dtypes.PrecisionType",
    "verl.trainer.ppo.reward.load_reward_manager",
    "verl.trainer.ppo.reward.compute_reward",
    "verl.utils.debug.metrics.calculate_debug_metrics",
    "verl.protocol.unpad_dataproto",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.main_ppo.create_rl_sampler",
    "verl.utils.device.get_nccl_backend",
    "verl.utils.seqlen_balancing.rearrange_micro_batches",
    "verl.workers.reward_manager.register",
    "verl.utils.profiler.simple_timer",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_imports_and_the_readme_says_how_it_is_given(name):
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        assert getattr(importlib.import_module(module), attribute) is not None
    [test] = re.findall(rf"^\| `{re.escape(name)}` \|[^|]*\| `(\w+\.py)` \|$", README, re.MULTILINE)
    assert attribute in (Path(__file__).parent / test).read_text()


def test_rows_of_prompt_files(tmp_path, tiny_model):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "s", "extra_info": {"index": 7}},
        {"prompt": [{"role": "user", "content": "x" * 200}], "data_source": "s", "extra_info": {"index": 8}},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = OmegaConf.create({"max_prompt_length": 100, "filter_overlong_prompts": True, "shuffle": False})
    tokenizer = hf_tokenizer(str(tiny_model))
    dataset = create_rl_dataset([str(tmp_path / "rows.json")], config, tokenizer, None)
    assert isinstance(dataset, RLHFDataset) and len(dataset) == 1
    row = dataset[0]
    assert row["raw_prompt"] == rows[0]["prompt"] and row["index"] == 7 and row["data_source"] == "s"
    assert row["dummy_tensor"].shape == (1,) and row["tools_kwargs"] == {}
    assert list(create_rl_sampler(config, dataset)) == [0]


def test_settings_are_checked_together():
    good = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 4}}}
    good |= {"data": {"train_files": "x.parquet"}}
    validate_config(OmegaConf.create(good), use_reference_policy=False, use_critic=False)
    with pytest.raises(ConfigError, match="adv_estimator"):
        validate_config(OmegaConf.create(good | {"algorithm": {"adv_estimator": "gpro"}}))


def test_tools_keep_their_interface():
    import asyncio

    schema = {"type": "function", "function": {"name": "calc", "description": "adds", "parameters": {"type": "object"}}}

    class Calculator(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=str(sum(parameters["numbers"]))), 0.5, {}

    async def conversation():
        tool = Calculator({}, OpenAIFunctionToolSchema.model_validate(schema))
        name, _ = await tool.create()
        answer = await tool.execute(name, {"numbers": [1, 2]})
        await tool.release(name)
        return tool.name, answer

    name, (response, reward, _) = asyncio.run(conversation())
    assert (name, response.text, reward) == ("calc", "3", 0.5)
    parsed = OpenAIFunctionParsedSchema(name="calc", arguments="not json")
    assert OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)[1] is True
