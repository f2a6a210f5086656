"""`posttrain plan`: what each setting does to the planned memory, and what the command prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.config import PPOConfig, load_config
from posttrain.doctor.plan_command import ROWS, report
from posttrain.planning import cuda_bytes
from posttrain.planning.memory_plan import GIB, Device, Plan, find_remedies
from posttrain.planning.rl import RLPlanner

GPU = Device("cuda", 80 * GIB, "a GPU of 80 GiB")
CPU = Device("cpu", 16 * GIB, "the CPU")
CACHE, CHECKPOINTING = "KV cache", "model.enable_gradient_checkpointing"


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: its config.json is enough."""
    made = tmp_path_factory.mktemp("no-weights")
    shutil.copy(tiny_model / "config.json", made)
    return made


@pytest.fixture(scope="module")
def planner() -> RLPlanner:
    return RLPlanner()


@pytest.fixture(scope="module")
def settings(folder: Path):
    """Configurations of a GRPO run of 16 prompts x 4 responses; keyword arguments are short keys, __ for the dots."""

    def make(**more: Any) -> PPOConfig:
        base = {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": str(folder),
            "data.train_files": "x.json",
            "data.train_batch_size": 16,
            "data.max_prompt_length": 32,
            "data.max_response_length": 32,
            "rollout.n": 4,
            "actor.ppo_mini_batch_size": 16,
            "actor.ppo_max_token_len_per_gpu": 1024,
            "critic.ppo_max_token_len_per_gpu": 1024,
        }
        given = base | {key.replace("__", "."): value for key, value in more.items()}
        return load_config(given).config

    return make


@pytest.fixture(scope="module")
def planned(settings, planner):
    def make(device: Device = GPU, **more: Any) -> Plan:
        return planner.plan(settings(**more), device)

    return make


def actor_part(plan: Plan) -> int:
    """What the actor's role takes at the worst moment of its update."""
    own = [sum(b for p, b in parts.items() if p.startswith("actor")) for parts in plan.stages.values()]
    return max(own)


def test_the_mini_batch_changes_no_memory_because_the_token_budget_bounds_a_pass(planned):
    small, large = planned(actor__ppo_mini_batch_size=8), planned(actor__ppo_mini_batch_size=16)
    assert small.peak("update") == large.peak("update")
    assert planned(actor__ppo_max_token_len_per_gpu=2048).peak("update") > large.peak("update")


def test_grpo_has_no_critic_and_takes_less_than_gae(planned):
    grpo, gae = planned(), planned(algorithm__adv_estimator="gae")
    assert not [part for parts in grpo.stages.values() for part in parts if "critic" in part]
    assert list(grpo.stages) == ["load", "generate", "log-probs", "update", "step"]
    assert list(gae.stages) == ["load", "generate", "log-probs", "critic update", "critic step", "update", "step"]
    resident = gae.largest("critic weights") + gae.largest("critic optimizer")
    assert resident > 10_000
    for stage in set(grpo.stages) - {"load"}:
        assert gae.peak(stage) >= grpo.peak(stage) + resident
    assert gae.peak("load") >= grpo.peak("load") + gae.largest("critic weights")
    assert gae.peak() > grpo.peak()


def test_checkpointing_and_lora_each_lower_the_actors_part(planned):
    full = planned()
    light = planned(**{CHECKPOINTING: True})
    lora = planned(model__lora_rank=2, actor__ppo_max_token_len_per_gpu=64)
    assert actor_part(light) < 0.5 * actor_part(full)
    assert light.largest("actor optimizer") == full.largest("actor optimizer")
    assert lora.largest("actor optimizer") < 0.3 * full.largest("actor optimizer")
    assert lora.largest("actor gradients") < 0.3 * full.largest("actor gradients")
    assert actor_part(lora) < actor_part(planned(actor__ppo_max_token_len_per_gpu=64))


def test_a_base_of_4_bits_takes_a_quarter_of_bfloat16_and_room_for_one_matrix(planned, monkeypatch):
    """Both counted by transformers' layers, which a base of 4 bits takes."""
    monkeypatch.setattr(cuda_bytes, "sizes_of", lambda model: None)
    lora = planned(model__lora_rank=2, model__dtype="bfloat16")
    qlora = planned(model__lora_rank=2, model__dtype="bfloat16", model__quantization="nf4")
    layers = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)  # numbers in the linear layers of two blocks
    saved = lora.largest("actor weights") - qlora.largest("actor weights")
    assert 2 * layers * 0.74 < saved < 2 * layers * 0.75  # 4 bits and their scales instead of 16
    assert qlora.largest("actor optimizer") == lora.largest("actor optimizer")
    matrix = 2 * 32 * 64  # the largest one, unpacked
    for stage, more in (("generate", matrix), ("log-probs", matrix), ("update", matrix), ("step", 0)):
        assert qlora.stages[stage]["temporary tensors"] - lora.stages[stage]["temporary tensors"] == more, stage


def test_adapters_of_the_critic_lower_its_part(planned):
    whole = planned(algorithm__adv_estimator="gae")
    lora = planned(algorithm__adv_estimator="gae", critic__model__lora_rank=2)
    assert lora.largest("critic optimizer") < 0.3 * whole.largest("critic optimizer")
    assert lora.largest("critic gradients") < 0.3 * whole.largest("critic gradients")
    assert lora.largest("critic weights") > whole.largest("critic weights")


def test_offload_moves_the_reference_to_host_memory(planned):
    part, on = "reference weights", {"actor__use_kl_loss": True}
    here, away = planned(**on), planned(**on, ref__fsdp_config__param_offload=True)
    weights = here.largest("actor weights")
    assert [parts[part] for parts in here.stages.values()] == [weights] * 5
    assert [parts[part] for parts in away.stages.values()] == [weights, 0, weights, 0, 0]  # it is loaded there
    assert away.host == {part: weights} and here.host == {}
    for stage in ("generate", "update", "step"):
        assert here.peak(stage) - away.peak(stage) == weights
    assert part not in planned().stages["update"]  # no KL, no reference
    assert part not in planned(**on, model__lora_rank=2).stages["update"]  # the base with its adapters off
    on_cpu = planned(CPU, **on, ref__fsdp_config__param_offload=True)
    assert on_cpu.host == {} and on_cpu.stages["update"][part] > 0  # there host memory is the device's


def test_optimizer_offload_leaves_the_state_on_the_device_in_the_update_alone(planned):
    plan = planned(actor__fsdp_config__optimizer_offload=True)
    size = planned().largest("actor optimizer")
    masters = size // 3  # made where the weights are; two moments come with the first step
    assert [parts["actor optimizer"] for parts in plan.stages.values()] == [masters, 0, 0, size, size]


def test_cache_falls_with_n_max_num_seqs_and_gpu_memory_utilization(planned):
    token = 2 * 2 * 2 * 8 * 2  # layers, k/v, heads, head size, bf16
    waves = {"rollout__name": "hf"}
    cache = planned(**waves).largest(CACHE)
    assert cache == 16 * 4 * 64 * token  # responses x tokens
    assert planned(**waves, rollout__n=2).largest(CACHE) == cache / 2
    assert planned(**waves, rollout__max_num_seqs=16).largest(CACHE) == cache / 4
    assert planned(**waves, rollout__max_num_seqs=10_000).largest(CACHE) == cache  # never more than the batch
    native = {n: planned(rollout__n=n).largest(CACHE) for n in (4, 2)}
    assert native[4] == (16 + 16 * 4) * 9 / 8 * 32 * token  # prompts + responses, a block each, and an eighth more
    assert native[2] == (16 + 16 * 2) * 9 / 8 * 32 * token
    assert planned(rollout__max_num_seqs=16).largest(CACHE) < native[4] / 3
    assert planned(rollout__kv_cache_gb=2**-14).largest(CACHE) == 2**16
    serving = {"rollout__name": "vllm"}
    half = planned(**serving, rollout__gpu_memory_utilization=0.5).stages["generate"]
    assert half[CACHE] + half["rollout weights"] == 40 * GIB
    assert planned(**serving, rollout__gpu_memory_utilization=0.3).largest(CACHE) == half[CACHE] - 16 * GIB


def test_vllm_has_weights_of_its_own_and_takes_its_cache_at_once(planned):
    token, weights = 2 * 2 * 2 * 8 * 2, planned().largest("actor weights")
    on_gpu = planned(rollout__name="vllm", rollout__kv_cache_gb=2)
    assert on_gpu.stages["generate"]["rollout weights"] == weights and on_gpu.largest(CACHE) == 2 * GIB
    assert on_gpu.stages["generate"]["temporary tensors"] > 0  # vLLM does not measure them then
    assert "rollout weights" not in on_gpu.stages["update"]  # it sleeps
    on_cpu = planned(CPU, rollout__name="vllm", rollout__max_num_seqs=8)
    assert on_cpu.largest(CACHE) == 8 * (65 + 128) * 2 * token  # float32
    assert on_cpu.stages["update"]["rollout weights"] == on_cpu.largest("actor weights")  # there they stay
    apart = planned(rollout__name="vllm", rollout__gpu_memory_utilization=0.5, actor_rollout_ref__rollout__n_workers=1)
    assert apart.stages["generate"]["rollout weights"] == weights and "rollout weights" not in apart.stages["update"]
    assert apart.stages["generate"][CACHE] + weights == 40 * GIB


def test_fp8_copies_take_a_byte_of_every_weight_of_the_layers_and_stay_in_the_update(planned, planner, settings):
    from posttrain.planning.counting import decoder_of

    layers = decoder_of(planner.build(settings(), GPU, "actor")).layers
    matrices = [weight for weight in layers.parameters() if weight.dim() > 1]
    wanted = sum(weight.numel() + 4 * len(weight) for weight in matrices)
    plan = planned(rollout__quantization="fp8")
    assert plan.stages["generate"]["rollout weights"] == plan.stages["update"]["rollout weights"] == wanted > 0
    assert planned().largest("rollout weights") == 0


def test_a_base_in_fp8_takes_two_bytes_of_every_weight_and_shares_one_with_the_rollout(planned, planner, settings):
    more = {"model__lora_rank": 2, "actor__quantization": "fp8"}
    lora, base = planned(model__lora_rank=2), planned(**more)
    copies = planned(model__lora_rank=2, rollout__quantization="fp8").largest("rollout weights")
    assert copies > 0
    part = "actor fp8 copies"
    assert base.stages["generate"][part] == base.stages["update"][part] == 2 * copies
    both = planned(**more, rollout__quantization="fp8")
    assert both.stages["update"][part] == both.stages["update"]["rollout weights"] == copies
    assert part not in lora.stages["update"]
    for stage in ("log-probs", "update"):  # and room for what is rounded
        assert base.stages[stage]["temporary tensors"] > lora.stages[stage]["temporary tensors"]


def test_every_remedy_lowers_the_predicted_peak_and_is_named_with_its_value(settings, planned, planner):
    assert planned(**{CHECKPOINTING: True}).peak("update") < planned().peak("update")
    assert planned(rollout__n=2).peak("generate") < planned().peak("generate")
    more = {"rollout__name": "vllm", "rollout__gpu_memory_utilization": 0.8}
    config, plan = settings(**more), planned(**more)
    remedies = {remedy.key.split(".", 1)[1]: remedy for remedy in find_remedies(config, plan, planner)}
    assert remedies["rollout.gpu_memory_utilization"].value == 0.6
    assert remedies["rollout.gpu_memory_utilization"].saves == pytest.approx(0.2 * 80 * GIB, abs=10)
    text = report(config, plan, list(remedies.values()))
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.8: with 0.6, generate takes 16.00 GiB less" in text
    assert "actor_rollout_ref.rollout.n=4: " in text
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=False: with True, update takes" in text


def test_a_remedy_that_changes_nothing_says_so(settings, planned, planner):
    found = find_remedies(settings(), planned(), planner)
    utilization = next(r for r in found if r.key.endswith("gpu_memory_utilization"))
    assert utilization.words() == "actor_rollout_ref.rollout.gpu_memory_utilization=None: changes nothing here"
    assert found[0].stage == planned().worst and found[0].saves == max(
        r.saves for r in found if r.stage == planned().worst
    )
    assert not [r for r in found if r.key.startswith("critic")]


def test_more_workers_share_weights_gradients_and_optimizer_state(planned):
    one, four = planned(), planned(trainer__n_gpus_per_node=4)
    for part in ("actor weights", "actor gradients", "actor optimizer"):
        assert four.largest(part) == pytest.approx(one.largest(part) / 4, abs=4)
    assert four.stages["generate"]["rollout weights"] == one.largest("actor weights")  # no longer the actor's own
    assert four.largest(CACHE) == pytest.approx(one.largest(CACHE) / 4, rel=0.05)


def test_workers_that_hold_one_engine_have_half_of_its_weights_and_cache_and_all_of_its_responses(planned):
    size = "actor_rollout_ref__rollout__tensor_model_parallel_size"
    for many in ({"trainer__n_gpus_per_node": 4}, {"actor_rollout_ref__rollout__n_workers": 4}):
        alone, two = planned(**many), planned(**many, **{size: 2})
        weights, cache = (alone.stages["generate"][part] for part in ("rollout weights", CACHE))
        assert two.stages["generate"]["rollout weights"] == pytest.approx(weights / 2, abs=1)
        assert two.largest(CACHE) == pytest.approx(cache, rel=0.05)  # half a token's, of twice the responses
    four = planned(trainer__n_gpus_per_node=4, **{size: 4})
    assert four.largest(CACHE) == pytest.approx(2 * cache, rel=0.05)  # two heads of keys: each is on two workers


def test_stages_of_an_engine_hold_their_layers_and_the_first_or_last_an_end_of_the_model(planned):
    vllm = {"actor_rollout_ref__rollout__name": "vllm", "trainer__n_gpus_per_node": 4}
    stages = "actor_rollout_ref__rollout__pipeline_model_parallel_size"
    whole = planned(**vllm).stages["generate"]["rollout weights"]
    two = planned(**vllm, **{stages: 2}).stages["generate"]["rollout weights"]
    assert whole / 2 < two < whole
    cut = planned(**vllm, **{stages: 2, "actor_rollout_ref__rollout__tensor_model_parallel_size": 2})
    assert cut.stages["generate"]["rollout weights"] == pytest.approx(two / 2, abs=1)


def test_workers_that_only_generate_have_the_cache_and_those_that_train_the_rest(planned):
    together, apart = planned(), planned(actor_rollout_ref__rollout__n_workers=2)
    generate, update = apart.stages["generate"], apart.stages["update"]
    assert generate["rollout weights"] == together.stages["generate"]["actor weights"] and "KV cache" not in update
    assert {"actor weights", "actor optimizer"} <= update.keys() - generate.keys()
    assert 0 < generate["KV cache"] < together.stages["generate"]["KV cache"]  # each has half of the responses


def test_a_role_on_workers_of_its_own_has_the_stages_of_these_and_leaves_the_others(planned, folder):
    model = {"reward_model.enable": True, "reward_model.model.path": str(folder)}
    everything = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True, **model}
    inside = planned(**everything)
    own = {"critic__n_workers": 2, "actor_rollout_ref__ref__n_workers": 1, "reward_model__n_workers": 2}
    apart = planned(**everything, **own)
    parts = {stage: {part for part, size in held.items() if size} for stage, held in apart.stages.items()}
    common = {"temporary tensors", "workspaces"}
    assert parts["reward model"] - common == {"reward model weights"} and parts["ref"] - common == {"reference weights"}
    assert parts["values"] - common == {"critic weights", "critic optimizer"}
    assert parts["critic update"] - common == {
        f"critic {p}" for p in ("weights", "gradients", "optimizer", "activations")
    }
    for stage in ("load", "generate", "log-probs", "update", "step"):
        assert not {part for part in parts[stage] if part.startswith(("critic", "reference", "reward"))}, stage
        assert apart.peak(stage) < inside.peak(stage)
    halves = apart.largest("critic weights"), apart.largest("critic optimizer")
    assert halves == pytest.approx(
        [inside.largest(f"critic {part}") / 2 for part in ("weights", "optimizer")], rel=0.01
    )
    # Every worker of a reward model has all of it, as one that trains.
    assert apart.largest("reward model weights") == inside.largest("reward model weights")
    assert planned(**everything, trainer__n_gpus_per_node=4).largest("reward model weights") == apart.largest(
        "reward model weights"
    )


def test_the_plan_says_which_columns_are_of_which_workers(settings, planner):
    config = settings(algorithm__adv_estimator="gae", critic__n_workers=2)
    text = report(config, planner.plan(config, GPU), [])
    assert "The columns values, critic update, critic step are of each of the 2 worker(s) of the critic." in text


def test_token_budget_and_micro_batch_size_bound_the_activations(planned):
    whole = planned().largest("actor activations")
    assert planned(actor__ppo_max_token_len_per_gpu=512).largest("actor activations") == pytest.approx(whole / 2, 0.01)
    assert planned(actor__ppo_micro_batch_size_per_gpu=4).largest("actor activations") == pytest.approx(whole / 4, 0.02)
    # One row is always computed whole.
    assert planned(actor__ppo_max_token_len_per_gpu=1).largest("actor activations") == pytest.approx(whole / 16, 0.05)


def test_every_planned_part_has_a_row_in_the_table(planned, folder):
    model = {"reward_model.enable": True, "reward_model.model.path": str(folder)}
    plan = planned(algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True, **model)
    assert {part for parts in plan.stages.values() for part in parts} == set(ROWS)


def test_a_reward_model_has_a_stage_of_its_own_and_its_weights_lie_there_alone_when_offloaded(planned, folder):
    model = {"reward_model.enable": True, "reward_model.model.path": str(folder)}
    alone, rated = planned(), planned(**model)
    assert list(rated.stages)[:4] == ["load", "generate", "reward model", "log-probs"]
    weights = rated.largest("reward model weights")
    # The policy's tied embedding and layers again, without its output matrix, and one row of scores in bfloat16.
    assert weights == rated.largest("actor weights") + 2 * 32
    assert rated.peak("update") - alone.peak("update") == weights
    moved = planned(**model, **{"reward_model.fsdp_config.param_offload": True})
    assert moved.host["reward model weights"] == weights and moved.peak("update") == alone.peak("update")
    assert moved.stages["reward model"]["reward model weights"] == weights


def test_the_reward_models_pass_grows_with_its_budget_and_its_rows(planned, folder):
    model = {"reward_model.enable": True, "reward_model.model.path": str(folder)}

    def temporary(**more: Any) -> int:
        plan = planned(**model, **{f"reward_model.{key}": value for key, value in more.items()})
        return plan.stages["reward model"]["temporary tensors"]

    whole = temporary()
    assert temporary(micro_batch_size_per_gpu=8) < temporary(forward_max_token_len_per_gpu=1024) < whole
    assert temporary(max_length=16) < whole


def test_the_critic_may_recompute_activations_by_itself(planned):
    plain = planned(algorithm__adv_estimator="gae")
    own = planned(algorithm__adv_estimator="gae", critic__model__enable_gradient_checkpointing=True)
    assert own.largest("critic activations") < plain.largest("critic activations")
    assert own.largest("actor activations") == plain.largest("actor activations")


def test_command_prints_the_table_and_whether_it_fits(folder, capsys):
    args = [f"actor_rollout_ref.model.path={folder}", "data.train_files=x.json", "algorithm.adv_estimator=grpo"]
    args += ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "data.max_response_length=32"]
    assert cli.main(["plan", "--gpu_gb", "80", *args]) == 0
    shown = capsys.readouterr().out
    assert "generate  log-probs" in shown and "It fits: the peak, in " in shown
    rows = [line.split("  ")[0] for line in shown.splitlines()]
    assert [row for row in ROWS if row in rows] == [
        r for r in ROWS if r.split()[0] not in ("critic", "reference", "reward")
    ]
    assert cli.main(["plan", "--gpu_gb=0.001", *args]) == 1
    assert "It does not fit: the peak, in " in capsys.readouterr().out


def test_command_reads_the_arguments_of_train_sh(folder, capsys, monkeypatch):
    monkeypatch.setenv("TRAIN_BATCH_SIZE", "8")
    args = [
        "train",
        "--model",
        str(folder),
        "--train_files",
        "x.json",
        "--rollout_n",
        "3",
        "actor.ppo_mini_batch_size=8",
    ]
    assert cli.main(["plan", *args, "--max_response_length", "32", "--gpu_gb", "80"]) == 0
    shown = capsys.readouterr().out
    assert "with grpo, for a GPU of 80 GiB" in shown and "at once 24 responses are generated" in shown
    assert "reference weights" in shown  # train.sh switches the KL loss on


def test_an_estimator_of_ones_own_says_itself_whether_it_has_a_critic(folder, tmp_path, capsys):
    own = tmp_path / "own_estimators.py"
    own.write_text(
        "from posttrain.algorithms import register_adv_est\n"
        "@register_adv_est('plan_own', needs_critic=True)\n"
        "def own(token_level_rewards, response_mask, **kwargs): ...\n"
    )
    args = [f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.model.external_lib={own}"]
    assert cli.main(["plan", *args, "data.train_files=x.json", "algorithm.adv_estimator=plan_own"]) == 0
    assert "critic optimizer" in capsys.readouterr().out


def test_help_of_the_verb_imports_nothing_heavy():
    code = "import sys; from posttrain import cli; cli.main(['plan', '--help']); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith("usage: posttrain plan") and ran.stdout.endswith("False\n")


def test_wrong_gpu_sizes_and_devices_are_said_in_words(folder, capsys):
    args = [f"actor_rollout_ref.model.path={folder}", "data.train_files=x.json"]
    for wrong in ("none", "-3", "nan"):
        assert cli.main(["plan", *args, "--gpu_gb", wrong]) == 2
        assert f"--gpu_gb {wrong}: give the GPU's memory in GiB" in capsys.readouterr().err
    assert cli.main(["plan", "--gpu_gb", "80", *args, "trainer.device=cpu"]) == 2
    assert "trainer.device=cpu" in capsys.readouterr().err
    assert cli.main(["plan", "actor_rollout_ref.model.path=/no/such/folder", "data.train_files=x.json"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


WORKERS, ROLLOUT = "trainer.n_gpus_per_node", "actor_rollout_ref.rollout"
SEQUENCE = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    "given, said",
    [
        ([f"{ROLLOUT}.tensor_model_parallel_size=3", f"{WORKERS}=4"], "does not divide the 4 x 1 = 4 worker"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", f"{WORKERS}=2", f"{ROLLOUT}.name=hf"], "an engine `hf` cannot be"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", f"{WORKERS}=2", f"{ROLLOUT}.name=sglang"], "devices is not built"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=8", f"{WORKERS}=8"], "4 of queries and 2 of keys; set one of 1, 2, 4"),
        ([f"{SEQUENCE}=4", f"{WORKERS}=4"], "4 heads of queries and 2 of keys, which is no multiple of it"),
        (
            [f"{SEQUENCE}=2", f"{WORKERS}=2", "actor_rollout_ref.model.use_remove_padding=false"],
            "are padded; set it to",
        ),
        (
            ["algorithm.adv_estimator=gae", f"{WORKERS}=4", "critic.ulysses_sequence_parallel_size=4"],
            "4 heads of queries and 2 of keys",
        ),
    ],
)
def test_what_the_run_refuses_is_refused_in_its_words(folder, capsys, given, said):
    args = [f"actor_rollout_ref.model.path={folder}", "data.train_files=x.json", "--gpu_gb=80", "rollout.n=4"]
    assert cli.main(["plan", *args, *given]) == 2
    shown = capsys.readouterr()
    assert said in " ".join(shown.err.split()) and "It fits" not in shown.out


@pytest.mark.parametrize("gpu", [["--gpu_gb=80"], pytest.param([], marks=pytest.mark.slow)])
def test_a_mixture_that_native_cannot_split_has_a_plan_and_the_engine_that_can(gpu, tmp_path, capsys):
    """As the command of a large mixture that names no engine: its config.json is enough to say so."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 261}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape | experts | kind))
    given = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=x.json", "rollout.n=4"]
    cli.main(["plan", *given, *gpu, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{WORKERS}=2"])
    table, rejected, said = " ".join(capsys.readouterr().out.split()).partition(
        "would be rejected." if gpu else "would reject the run."
    )
    assert rejected and "Memory plan of" in table and "update" in table
    assert "models of the kind qwen3_moe cannot be cut" in said and f"set {ROLLOUT}.name=vllm, which cuts them" in said
    cli.main(["plan", *given, *gpu, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{WORKERS}=2", f"{ROLLOUT}.name=vllm"])
    assert "cannot be cut" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [
        [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{WORKERS}=4"],
        [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{WORKERS}=8"],  # fewer heads of keys than workers
        [f"{SEQUENCE}=2", f"{WORKERS}=4"],
    ],
)
def test_what_the_run_takes_is_planned(folder, capsys, given):
    args = [f"actor_rollout_ref.model.path={folder}", "data.train_files=x.json", "--gpu_gb=80", "rollout.n=4"]
    assert cli.main(["plan", *args, *given]) == 0
    assert "It fits" in capsys.readouterr().out


def test_what_this_machine_lacks_is_said_beside_a_plan_for_it_and_not_beside_one_for_another(folder, capsys):
    args = [
        f"actor_rollout_ref.model.path={folder}",
        "data.train_files=x.json",
        "rollout.n=4",
        "data.train_batch_size=8",
    ]
    args += ["actor.ppo_mini_batch_size=8", "data.max_response_length=32"]
    assert cli.main(["plan", *args, "trainer.device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "It fits" in shown and "This machine would reject the run." in shown and "x.json does not exist" in shown
    assert cli.main(["plan", *args, "--gpu_gb=80"]) == 0
    assert "reject" not in capsys.readouterr().out
