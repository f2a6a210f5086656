"""What the memory plan decides on a CUDA device: the cache's size and the tokens of a pass, where nobody set them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from posttrain.bench.workload import PRESETS
from posttrain.config import load_config
from posttrain.config.trees import SFT
from posttrain.planning import cuda_bytes
from posttrain.planning.budgets import Sizes, apply_plan
from posttrain.planning.memory_plan import GIB, USABLE, Device, Plan
from posttrain.planning.rl import RLPlanner, Shape
from posttrain.planning.supervised import SupervisedPlanner
from posttrain.trainer.run import memory

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
PLANNER = RLPlanner()  # models are counted once for all tests


def gpu(gib: float) -> Device:
    return Device("cuda", int(gib * GIB), f"a GPU of {gib:g} GiB")


def write_shape(folder: Path, **more: int) -> str:
    """The shape of a model of 0.5B, without weights."""
    shape = {key: value for key, value in vars(PRESETS["0.5b"]).items() if key != "dtype"} | more
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**kind, **shape}))
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(tmp_path_factory.mktemp("shape"))


def resolved(model: str, **more):
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.n": 8,
        "data.train_files": "x.json",
        "data.train_batch_size": 64,
        "data.max_prompt_length": 128,
        "data.max_response_length": 512,
    }
    return load_config(given | {key.replace("__", "."): value for key, value in more.items()})


def settled(found, device: Device):
    said = apply_plan(found.config, device, found.explicit, PLANNER)
    return found.config, said, PLANNER.plan(found.config, device)


def test_vllm_may_take_what_the_trainer_leaves_of_the_device(model):
    config, said, plan = settled(resolved(model, actor_rollout_ref__rollout__name="vllm"), gpu(40))
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    assert f"vLLM may take {100 * share:.0f}% of the device ({key}; chosen by the memory plan)." in said
    generate = plan.stages["generate"]
    others = sum(generate.values()) - generate["KV cache"] - generate["rollout weights"]
    assert 0 <= USABLE * 40 * GIB - others - share * 40 * GIB < 0.01 * 40 * GIB
    assert config.actor_rollout_ref.rollout.kv_cache_gb is None
    own, said, _ = settled(
        resolved(model, actor_rollout_ref__rollout__name="vllm", **{key.replace(".", "__"): 0.3}), gpu(40)
    )
    assert own.actor_rollout_ref.rollout.gpu_memory_utilization == 0.3 and not any("vLLM" in one for one in said)


def test_where_all_fits_the_default_stays_and_the_cache_may_take_what_is_left(model):
    config, said, plan = settled(resolved(model), gpu(140))
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    others = plan.peak("generate") - plan.stages["generate"]["KV cache"]
    limit = config.actor_rollout_ref.rollout.kv_cache_gb * GIB
    assert limit + others == pytest.approx(USABLE * 140 * GIB, abs=0.02 * GIB)
    assert len(said) == 1 and said[0].startswith(f"The key/value cache may take {limit / GIB:.2f} GiB (")


def test_where_the_default_does_not_fit_a_pass_has_the_most_tokens_that_do(model):
    found = resolved(model)
    config, said, plan = settled(found, gpu(16))
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    assert 640 <= tokens < 16384 and plan.fits
    assert f"{TOKENS} was not set: by the memory plan {tokens} tokens at once fit here, not the usual 16384." in said
    sizes = PLANNER.count(config, gpu(16), "actor", cuda_bytes.sizes_of)
    others = plan.peak("update") - sum(
        plan.stages["update"][part] for part in ("actor activations", "temporary tensors")
    )

    def full(budget: int) -> int:
        """Passes that no prompt is shared in, as the trial before the first update has them."""
        rows = budget // 639
        return others + cuda_bytes.update_bytes(sizes, rows * 639, rows * 512, False, 16 * GIB)[1]

    assert full(tokens) <= USABLE * 16 * GIB < full(tokens * 3 // 2)  # the next of those that are tried


def test_what_was_set_is_left_alone(model):
    given = {TOKENS.replace(".", "__"): 16384, "actor_rollout_ref__rollout__kv_cache_gb": 2.0}
    config, said, plan = settled(resolved(model, **given), gpu(16))
    assert said == [] and not plan.fits
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    assert config.actor_rollout_ref.rollout.kv_cache_gb == 2.0


def test_a_run_that_cannot_fit_is_told_so_and_on_a_cpu_nothing_is_decided(model):
    _, said, _ = settled(resolved(model), gpu(8))
    assert any("does not fit: update would take" in sentence for sentence in said)
    found = resolved(model)
    assert apply_plan(found.config, Device("cpu", GIB, "the CPU"), set(), PLANNER) == []
    assert found.config.actor_rollout_ref.rollout.kv_cache_gb is None


def test_a_critic_has_a_budget_of_its_own_and_supervised_runs_have_theirs(tmp_path):
    model = write_shape(tmp_path, num_hidden_layers=4)  # counting the passes of all 24 takes ten seconds
    config, said, plan = settled(resolved(model, algorithm__adv_estimator="gae"), gpu(10))
    assert config.critic.ppo_max_token_len_per_gpu < 16384 and plan.fits
    assert any(sentence.startswith("critic.ppo_max_token_len_per_gpu was not set") for sentence in said)
    given = {"model.path": model, "data.train_files": "x.json", "data.max_length": 1024, "data.train_batch_size": 64}
    found, planner = load_config(given, tree=SFT), SupervisedPlanner()
    (sentence,) = apply_plan(found.config, gpu(6), found.explicit, planner)
    assert sentence.startswith("data.max_token_len_per_gpu was not set")
    assert planner.plan(found.config, gpu(6)).fits


def test_budgets_that_meet_in_one_stage_are_lowered_until_all_stages_fit():
    """Neither the actor's nor the critic's alone would make the log-probs fit."""
    config = load_config({"algorithm.adv_estimator": "gae", "data.train_files": "x.json"}).config

    class ByTokens(RLPlanner):
        def plan(self, config, device):
            actor = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            critic = config.critic.ppo_max_token_len_per_gpu
            sizes = {"update": actor, "critic update": 2 * critic, "log-probs": 3 * max(actor, critic)}
            stages = {"generate": {"KV cache": 0}, **{name: {"rows": size} for name, size in sizes.items()}}
            return Plan(device, Shape.of(config), stages)

        def count(self, *asked):
            return None

    said = apply_plan(config, Device("cuda", 20000, ""), set(), ByTokens())
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4096  # 3 x 4,096 of 18,000 that are usable
    assert config.critic.ppo_max_token_len_per_gpu == 4096
    assert [sentence.partition(" was not set")[0] for sentence in said[1:]] == [
        TOKENS,
        "critic.ppo_max_token_len_per_gpu",
    ]


def test_a_run_settles_before_it_loads_and_goes_on_where_no_plan_can_be_made(model, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.planning.memory_plan.find_device", lambda config: gpu(16))
    monkeypatch.setattr("posttrain.planning.budgets.planner_for", lambda config: PLANNER)
    found = resolved(model)
    memory.plan_memory(found.config, torch.device("cuda"), found.explicit)
    assert found.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu < 16384
    assert "tokens at once fit here" in capsys.readouterr().out
    untouched = resolved(model, actor_rollout_ref__model__path="/no/such/folder")
    memory.plan_memory(untouched.config, torch.device("cuda"), untouched.explicit)
    assert untouched.config.actor_rollout_ref.rollout.kv_cache_gb is None
    assert "No memory plan could be made, so that defaults stay as they are" in capsys.readouterr().out


def test_the_trainers_of_every_kind_settle_memory_before_workers_are_made(tiny_model: Path, tmp_path, monkeypatch):
    import posttrain
    from posttrain.trainer.fsdp_sft_trainer import run_sft

    class Settled(Exception):
        pass

    def instead(config, device, explicit, workers=None):
        raise Settled(sorted(explicit)[-1])

    rows = [{"prompt": "1 + 1 =", "ground_truth": "2", "data_source": "math"}] * 4
    common = {"trainer.default_local_dir": str(tmp_path), "trainer.device": "cpu"}
    monkeypatch.setattr("posttrain.trainer.ppo.parts.plan_memory", instead)
    monkeypatch.setattr("posttrain.trainer.supervised.loop.plan_memory", instead)
    with pytest.raises(Settled, match=r"trainer\."):
        posttrain.train({"actor_rollout_ref.model.path": str(tiny_model), **common}, data=rows)
    with pytest.raises(Settled, match=r"trainer\."):
        run_sft({"model.path": str(tiny_model), **common}, data=[{"prompt": "1 + 1 =", "response": "2"}] * 4)


def test_a_run_tells_the_plan_which_settings_were_given(monkeypatch, capsys):
    from posttrain.config.root import PPOConfig
    from posttrain.planning import budgets
    from posttrain.planning import memory_plan as devices
    from posttrain.trainer.run.memory import plan_memory

    told = []
    monkeypatch.setattr(devices, "find_device", lambda config: "the device")
    monkeypatch.setattr(budgets, "apply_plan", lambda *given: told.append(given[1:3]) or ["The plan chose."])
    plan_memory(PPOConfig(), torch.device("cuda"), {"given.key"})
    assert told == [("the device", {"given.key"})] and "The plan chose." in capsys.readouterr().out
    plan_memory(PPOConfig(), torch.device("cpu"), set())
    assert len(told) == 1, "on a CPU nothing is settled"


def test_a_model_that_only_generates_leaves_its_cache_what_is_free(model, monkeypatch):
    """Where a training run would have optimizer and gradients; the free memory counts, not all of the device."""
    from posttrain.commands.generation import session as generating
    from posttrain.commands.generation.settings import Settings
    from posttrain.config.model import ModelConfig

    def settled_for(**rollout) -> float | None:
        config = resolved(model, **rollout).config
        config.actor_rollout_ref.model.path, config.trainer.n_gpus_per_node = None, 8  # the run of a checkpoint
        settings = Settings(config, 4, 1.0, False, frozenset())
        monkeypatch.setattr(generating, "free_bytes", lambda device: 16 * GIB)
        monkeypatch.setattr("posttrain.planning.memory_plan.is_hopper", lambda device: False)
        generating.plan_cache(settings, ModelConfig(path=model), torch.device("cuda"), 100, pytest.fail)
        return config.actor_rollout_ref.rollout.kv_cache_gb

    config = resolved(model, actor_rollout_ref__rollout__n=4, data__train_batch_size=100).config
    parts = PLANNER.plan_generation(config, gpu(16)).stages["generate"]
    assert parts["actor weights"] > 0.9 * GIB and "actor optimizer" not in parts
    left = USABLE * 16 * GIB - sum(size for part, size in parts.items() if part != "KV cache")
    assert settled_for() == pytest.approx(left / GIB, abs=0.02) and left > 10 * GIB
    assert settled_for(actor_rollout_ref__rollout__kv_cache_gb=2.0) == 2.0
    assert settled_for(actor_rollout_ref__rollout__gpu_memory_utilization=0.5) is None


def test_generation_goes_on_where_no_plan_can_be_made_and_on_a_cpu_nothing_is_asked(monkeypatch):
    from posttrain.commands.generation import session as generating
    from posttrain.commands.generation.settings import Settings
    from posttrain.config.model import ModelConfig
    from posttrain.config.root import PPOConfig

    said, settings = [], Settings(PPOConfig(), 1, 0.0, False, frozenset())
    monkeypatch.setattr(generating, "free_bytes", lambda device: 16 * GIB)
    generating.plan_cache(settings, ModelConfig(path="/no/such"), torch.device("cuda"), 1, said.append)
    assert len(said) == 1 and said[0].startswith("note: No memory plan could be made")
    generating.plan_cache(settings, ModelConfig(path="/no/such"), torch.device("cpu"), 1, said.append)
    assert len(said) == 1 and settings.config.actor_rollout_ref.rollout.kv_cache_gb is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: y"), MemoryError()])
def test_generation_that_runs_out_of_any_memory_says_what_lowers_it(error):
    from posttrain.commands.generation.session import explain_out_of_memory
    from posttrain.config.rollout import RolloutConfig
    from posttrain.errors import UserError

    with pytest.raises(UserError, match="max_num_seqs=7"), explain_out_of_memory(RolloutConfig(max_num_seqs=7), 5):
        raise error
    with pytest.raises(RuntimeError, match="another"), explain_out_of_memory(RolloutConfig(), 5):
        raise RuntimeError("another")


def test_errors_without_words_are_told_by_their_names(tmp_path, monkeypatch):
    """A model's own code may raise anything."""
    from transformers import AutoConfig

    from posttrain.commands.generation.session import ModelSource, set_lengths
    from posttrain.commands.generation.settings import Settings
    from posttrain.config.model import ModelConfig
    from posttrain.config.root import PPOConfig
    from posttrain.errors import UserError
    from posttrain.models.loading import ModelError

    def fail(error):
        raise error

    with pytest.raises(UserError, match="cannot be counted without weights: NotImplementedError\\n"):
        PLANNER.count(
            load_config({"data.train_files": "x"}).config, gpu(1), "actor", lambda model: fail(NotImplementedError())
        )
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *given, **named: fail(OSError()))
    with pytest.raises(ModelError, match=r"could not be read: OSError$"):
        set_lengths(ModelSource("mine", ModelConfig(path="mine")), Settings(PPOConfig(), 1, 0.0, False, frozenset()))


def test_the_sizes_of_a_step_say_that_the_last_mini_batch_is_smaller():
    step = "makes 2 optimizer steps on mini-batches of 50 prompts (250 responses; the last has 22 prompts)."
    assert step in Sizes(prompts=72, responses=360, mini_batch_prompts=50, updates_per_step=2, total_steps=10).words()
    even = Sizes(prompts=100, responses=500, mini_batch_prompts=50, updates_per_step=2, total_steps=10).words()
    assert even.endswith("on mini-batches of 50 prompts (250 responses).")
    one = Sizes(prompts=100, responses=500, mini_batch_prompts=50, updates_per_step=2, total_steps=1).words()
    assert even.startswith("10 steps; each") and one.startswith("1 step; each")
