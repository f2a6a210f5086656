"""`posttrain plan --gpus`: costs against what was measured on one H200, what fits, what is sent, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from posttrain.config import load_config
from posttrain.doctor import plan_command
from posttrain.doctor.fleet_command import work_of
from posttrain.errors import UserError
from posttrain.planning.fleet.costs import Layout, Pricing, StepCosts, Work
from posttrain.planning.fleet.inputs import SHAPES, Constants, ModelCosts, model_path
from posttrain.planning.fleet.search import Search
from posttrain.planning.memory_plan import GIB, Device
from posttrain.planning.rl import RLPlanner

H200 = Device("cuda", int(139.8 * GIB), "an H200", hopper=True)
ONE = Layout("fsdp", 1)


@cache
def costs_of(name: str, *settings: str) -> ModelCosts:
    with model_path(name) as path:
        config = load_config([f"actor_rollout_ref.model.path={path}", *settings]).config
        return RLPlanner().count(config, H200, "actor", ModelCosts.of)


def group(prompts: int, n: int, prompt: int, response: int, **more) -> Work:
    usual = {"mini": prompts, "budget": 16384, "slots": 1024, "scoring": 0, "trained": 1}
    usual |= {"texts": True, "gloo": False, "merged": False, "longest": response}
    return Work(prompts=prompts, n=n, prompt=prompt, response=response, **(usual | more))


def priced(model: ModelCosts, work: Work, layout: Layout, machine: int = 8, **assumed: float) -> StepCosts:
    return Pricing(model, work, Constants.given(assumed), machine).of(layout)


LORA = "actor_rollout_ref.model.lora_rank=32"
MEASURED = {  # docs/gpu.md: shape, settings, work, seconds of rollout and of the update
    "0.5B": ("0.5b", (), group(64, 8, 128, 512), 1.10, 2.06),
    "1.5B": ("1.5b", (), group(64, 8, 128, 512), 2.45, 5.01),
    "7B with LoRA": ("7b", (LORA,), group(64, 8, 128, 512), 8.6, 14.7),
    "0.5B, 32k": ("0.5b", (), group(8, 8, 128, 32640, budget=32768), 135, 38),
    "7B with LoRA, 16k": ("7b", (LORA,), group(8, 8, 128, 16256), 211, 77),
}


@pytest.mark.parametrize("case", MEASURED)
def test_stages_measured_on_one_h200_are_predicted_within_a_factor_of_1_3(case):
    name, settings, work, rollout, update = MEASURED[case]
    found = priced(costs_of(name, *settings), work, ONE)
    for stage, seconds in {"rollout": rollout, "update": update}.items():
        assert 1 / 1.3 < found.stages[stage] / seconds < 1.3, (stage, found.stages[stage], seconds)
    assert 1 / 1.3 < found.seconds / (rollout + update) < 1.3


def test_decode_steps_of_a_mixture_are_predicted_within_a_factor_of_1_3():
    model, work = costs_of("30b-a3b"), group(64, 8, 128, 256)
    step = Pricing(model, work, Constants.given(), 8).decode_step(ONE, 512, 256, StepCosts(), 1)
    assert 1 / 1.3 < step / 21.2e-3 < 1.3  # docs/gpu.md
    serving = Layout("fsdp", 1, engine="vllm")
    theirs = Pricing(model, work, Constants.given(), 8).decode_step(serving, 512, 256, StepCosts(), 1)
    assert 1 / 1.3 < theirs / 28.8e-3 < 1.3


def test_costs_of_models_are_their_published_sizes():
    dense, mixture = costs_of("70b"), costs_of("30b-a3b")
    assert dense.weights == pytest.approx(70.55e9, rel=1e-3) and dense.active == pytest.approx(69.5e9, rel=1e-3)
    assert mixture.weights == pytest.approx(30.53e9, rel=1e-3) and mixture.active == pytest.approx(3.04e9, rel=1e-2)
    assert (dense.cached(1), dense.cached(8), dense.cached(4)) == (327680, 40960, 81920)
    assert mixture.picked == 8 and mixture.chosen == 1 / 16 and mixture.narrow == 768
    assert costs_of("0.5b").active == costs_of("0.5b").matrices  # the table is the head, and counts once


@pytest.mark.slow
def test_recurrent_states_take_their_place_in_the_cache_and_are_read_and_written_in_every_step(tmp_path):
    """Three layers with the gated delta rule and one with attention; numbers by hand."""
    shape = {"model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "intermediate_size": 512,
             "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
             "shared_expert_intermediate_size": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
             "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = costs_of(str(tmp_path))
    convolved, matrices = (2 * 4 * 64 + 8 * 64) * 4 * 2, 8 * 64 * 64 * 4
    state, token = 3 * (convolved + matrices), 2 * 2 * 64 * 2
    assert (model.state, model.cached(1), model.attending) == (state, token, 1)

    work, constants = group(64, 8, 128, 256), Constants.given()
    costs = [StepCosts(), StepCosts()]
    for one, rows in zip(costs, (0, 256), strict=True):
        Pricing(replace(model, matrices=0, experts=0), work, constants, 8).decode_step(ONE, rows, 200, one, 1)
    read = (costs[1].busy["memory bandwidth"] - costs[0].busy["memory bandwidth"]) * constants["hbm_tb_s"]
    assert read == pytest.approx(256 * (200 * token + 2 * state))
    longer = priced(model, replace(work, prompt=1128), ONE).busy["matrix units"] * constants["peak_tflops"]
    more = longer - priced(model, work, ONE).busy["matrix units"] * constants["peak_tflops"]
    of_products, attended = 64 * 1000 * (2 + 6) * model.active, 64 * 2 * 512 * (1128**2 - 128**2)
    update = 6 * 512 * 64 * ((8 * 256 + 1128) * 1384 - (8 * 256 + 128) * 384)
    assert more == pytest.approx(of_products + attended + update)

    settings = {"data.max_prompt_length": 128, "data.max_response_length": 256, "actor_rollout_ref.rollout.n": 8}
    settings |= {"actor_rollout_ref.model.path": str(tmp_path), "actor_rollout_ref.rollout.kv_cache_gb": 0.25}
    pricing = Pricing(model, work, constants, 8)
    search = Search(load_config(settings).config, set(), RLPlanner(), H200, pricing, lambda settings: "")
    tried = search.try_layout(ONE, pricing.of(ONE))
    assert tried.layout.slots == GIB // 4 // (384 * token + state)


def test_pipeline_tensor_and_data_ranks_send_what_their_collectives_send():
    model, work = costs_of("0.5b"), group(64, 8, 128, 512)
    tokens = 64 * 8 * work.computed
    found = priced(model, work, Layout("megatron", 16, tensor=2, pipeline=2, context=2, checkpointing=True))
    own = tokens / 2 / 2  # of one of two copies, and of its half of a pass
    hidden = own * 896 * 2
    assert found.sent["tensor parallel", "NVLink"] == pytest.approx((4 * 3 + 2) * 12 * hidden / 2)
    assert found.sent["context parallel", "NVLink"] == pytest.approx(3 * 12 * own / 2 * (2 * 896 + 2 * 128) * 2 / 2)
    assert found.sent["pipeline", "network"] == pytest.approx(2 * hidden / 2)
    # Of 16 ranks the 8 of a stage share a machine: 4 of them have the same weights, and 3/4 of the sums go to others.
    assert found.sent["gradients", "NVLink"] == pytest.approx(6 * model.weights / 4 * 3 / 4)
    assert found.sent["weight sync: gathering", "network"] == 2 * model.weights
    one_machine = priced(model, work, Layout("megatron", 8, tensor=2, pipeline=2, context=2), machine=8)
    assert ("weight sync: gathering", "NVLink") in one_machine.sent and one_machine.sent["gradients", "NVLink"]
    assert {link for _, link in one_machine.sent} == {"NVLink"}  # neighbouring stages too
    alone = priced(model, work, Layout("megatron", 1))
    assert not alone.sent and alone.stages["weight sync"] == 0.0


def test_groups_that_cross_machines_send_over_the_network():
    model, work = costs_of("0.5b"), group(64, 8, 128, 512)
    spread = Layout("megatron", 12, tensor=4, each=6)  # ranks 4 to 7 are on two machines
    assert ("tensor parallel", "network") in priced(model, work, spread).sent
    assert ("tensor parallel", "NVLink") in priced(model, work, replace(spread, tensor=2)).sent
    staged = Layout("megatron", 64, pipeline=2)
    assert priced(model, work, staged).sent["gradients", "network"] == pytest.approx(6 * model.weights / 2 * 31 / 32)


def test_gradients_of_experts_are_sent_only_to_ranks_with_the_same_experts():
    model, work = costs_of("30b-a3b"), group(64, 8, 128, 512)
    once, twice = (
        priced(model, work, Layout("megatron", 8, expert=expert)).sent["gradients", "NVLink"] for expert in (8, 4)
    )
    dense = (model.weights - model.experts) * 7 / 8
    assert once == pytest.approx(6 * dense)  # no other rank has these experts
    assert twice == pytest.approx(6 * (dense + model.experts / 4 / 2))


def test_fsdp_gathers_weights_for_each_pass_and_back_and_overlaps_with_them():
    model, work = costs_of("0.5b"), group(64, 8, 128, 512, budget=5120)
    found = priced(model, work, Layout("fsdp", 8))
    passes = 8  # 64 sequences on each GPU, 8 of a group to a pass
    assert found.sent["FSDP weights", "NVLink"] == pytest.approx(passes * 2 * 2 * model.weights * 7 / 8)
    assert found.sent["gradients", "NVLink"] == pytest.approx(passes * 4 * model.weights * 7 / 8)
    slow = priced(model, work, Layout("fsdp", 8), nvlink_gb_s=1)
    sent = found.sent["FSDP weights", "NVLink"] + found.sent["gradients", "NVLink"]
    assert slow.stages["update"] == pytest.approx(sent / 0.8e9, rel=1e-2)  # passes are hidden behind it


def test_weight_sync_sends_adapters_alone_unless_they_are_merged_and_gloo_takes_its_time():
    model, work = costs_of("7b", LORA), group(64, 8, 128, 512)
    apart = Layout("fsdp", 8, generating=8)
    assert priced(model, work, apart).sent["weight sync: broadcast", "network"] == 2 * model.adapters
    split = priced(model, work, replace(apart, rollout_tensor=2))
    assert split.sent["weight sync: broadcast", "network"] == 2 * model.weights
    merged = priced(model, replace(work, merged=True), apart)
    assert merged.sent["weight sync: broadcast", "network"] == 2 * model.weights
    assert merged.stages["weight sync"] == pytest.approx(2 * model.weights / 40e9)
    by_gloo = priced(model, replace(work, merged=True, gloo=True), apart)
    assert by_gloo.stages["weight sync"] == pytest.approx(2 * model.weights / 1.9e9)


def test_a_batch_that_is_generated_ahead_hides_the_shorter_half():
    model, work = costs_of("0.5b"), group(64, 8, 128, 512)
    after, ahead = (priced(model, work, Layout("fsdp", 4, generating=4, ahead=ahead)) for ahead in (False, True))
    rollout, others = after.stages["rollout"], sum(after.stages.values()) - after.stages["rollout"]
    assert after.seconds == rollout + others and ahead.seconds == max(rollout, others)


def test_caches_that_hold_fewer_sequences_and_long_tails_take_longer():
    model, work = costs_of("0.5b"), group(64, 8, 128, 512)
    all_at_once, in_waves = (priced(model, work, replace(ONE, slots=slots)) for slots in (None, 64))
    assert in_waves.stages["rollout"] > 2 * all_at_once.stages["rollout"]
    tail = priced(model, replace(work, response=128.0), ONE).stages["rollout"]
    even = priced(model, replace(work, response=128.0, longest=128), ONE).stages["rollout"]
    assert even < tail < all_at_once.stages["rollout"]


def test_passes_hold_no_more_sequences_than_their_micro_batch():
    work = group(64, 8, 128, 512, budget=5120)
    assert work.passes(64) == 8
    assert replace(work, micro=16).passes(64) == 8  # the budget is smaller
    assert replace(work, micro=2).passes(64) == 32 and replace(work, micro=2).computed == 512 + 128 / 2
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    assert work_of(load_config(["algorithm.adv_estimator=grpo", micro]).config).micro == 2


def test_greedy_responses_are_generated_and_not_trained_on():
    model, work = costs_of("0.5b"), group(64, 1, 128, 512)
    alone, baseline = (priced(model, replace(work, greedy=greedy), ONE).stages for greedy in (0, 1))
    twice = priced(model, replace(work, prompts=128, mini=128), ONE).stages["rollout"]
    assert baseline["rollout"] == pytest.approx(twice) and baseline["update"] == alone["update"]
    remax = ["algorithm=remax", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    assert work_of(load_config(remax).config).greedy == 1


def test_pipeline_stages_wait_and_recomputation_costs_a_forward_pass():
    model, work = costs_of("0.5b"), group(8, 8, 128, 512, budget=5120)
    straight, staged, again = (
        priced(model, work, layout, nvlink_gb_s=1e9, network_gb_s=1e9).stages["update"]
        for layout in (
            Layout("megatron", 1),
            Layout("megatron", 4, pipeline=4),
            Layout("megatron", 1, checkpointing=True),
        )
    )
    assert staged == pytest.approx(straight / 4 * (1 + 3 / 8), rel=0.01)
    assert again == pytest.approx(straight * 8 / 6, rel=0.01)


def test_chunks_of_stages_wait_less_and_epochs_update_again():
    model, work = costs_of("0.5b"), group(8, 8, 128, 512, budget=5120)
    staged = Layout("megatron", 4, pipeline=4)
    plain, chunks = (
        priced(model, work, one, nvlink_gb_s=1e9).stages["update"] for one in (staged, replace(staged, virtual=2))
    )
    assert chunks / plain == pytest.approx((1 + 3 / 16) / (1 + 3 / 8), rel=0.01)
    again = priced(model, replace(work, epochs=3), staged, nvlink_gb_s=1e9)
    assert again.stages["update"] == pytest.approx(3 * plain)


def test_work_counts_the_passes_that_the_settings_need():
    plain = [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    ]
    assert work_of(load_config(plain).config).scoring == 0
    several = [*plain[:2], "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.use_kl_loss=True"]
    assert work_of(load_config(several).config).scoring == 2
    critic = work_of(load_config(["algorithm.adv_estimator=gae", *plain[1:]]).config)
    assert (critic.scoring, critic.trained) == (1, 2)
    assert work_of(load_config([*plain, "actor_rollout_ref.rollout.weight_sync=gloo"]).config).gloo
    epochs = work_of(load_config([*plain, "actor_rollout_ref.actor.ppo_epochs=2"]).config)
    assert (epochs.updates, epochs.scoring) == (2, 1)
    sampled = [*several[:3], "actor_rollout_ref.actor.old_log_probs=rollout"]
    assert work_of(load_config(sampled).config).scoring == 0
    assert work_of(load_config([*plain, "actor_rollout_ref.actor.old_log_probs=trainer"]).config).scoring == 1


@pytest.fixture
def small(tmp_path):
    """The folder of a model that is quick to plan."""
    shape = SHAPES["0.5b"] | {"num_hidden_layers": 4, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def said(capsys, *args: str) -> tuple[int, str]:
    status = plan_command.main(list(args))
    return status, capsys.readouterr().out


def test_the_plan_proposes_a_layout_that_fits_with_memory_time_traffic_and_constants(capsys, small):
    status, text = said(capsys, "--gpus", "16", "--model", str(small / "config.json"), "--gpus_per_machine", "4")
    assert status == 0 and text.startswith(f"{small}/config.json (0.1B weights) on 16 GPUs, 4 to a machine")
    parts = ["Proposed: colocated", "trainer.nnodes=4", "trainer.n_gpus_per_node=4", "Memory of a GPU", "update"]
    parts += ["Time of a step", "weight sync: gathering", "network", "Saturates first", "Also fits", "one step ahead"]
    for part in [*parts, "measured, one H200: docs/gpu.md", "assumed: 400 Gbit/s a GPU"]:
        assert part in text, part


def test_given_settings_and_assumptions_stay(capsys, small):
    fixed = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.rollout.name=vllm",
             "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "data.train_batch_size=32",
             "actor_rollout_ref.model.enable_gradient_checkpointing=True"]  # fmt: skip
    status, text = said(capsys, "--gpus=8", f"--model={small}", "--assume", "nvlink_gb_s=100", *fixed)
    proposed = text[text.index("Proposed") : text.index("Memory of")]
    assert status == 0 and all(setting in proposed for setting in [*fixed[:3], fixed[-1]])
    assert "32 prompts x 16" in text and "1 update(s)" in text
    assert "given by --assume" in text and "100 GB/s" in text


def test_presets_stay_as_given_settings_do(capsys, small):
    _, text = said(capsys, "--gpus", "2", "--model", str(small), "algorithm=ppo", "data.max_response_length=512")
    assert "512 prompts x 1 responses" not in text and "critic" in text
    _, text = said(capsys, "--gpus", "2", "--model", str(small), "algorithm=drgrpo", "data.max_response_length=512")
    assert "512 prompts x 5 responses of 512 tokens" in text


def test_a_batch_ahead_is_proposed_if_it_is_asked_for(capsys, small):
    for asked, words in (("trainer.one_step_off=True", "one step ahead"), ("trainer.max_staleness=3", "3 steps ahead")):
        status, text = said(capsys, "--gpus", "4", "--model", str(small), asked)
        assert status == 0 and "generate: " in text and words in text.split("Proposed", 1)[1].split("\n")[0]
        assert "colocated" not in text and "one_step_off=" not in text
    _, text = said(capsys, "--gpus", "4", "--model", str(small), "trainer.one_step_off=False")
    assert "Also fits" in text and "step ahead" not in text
    status, text = said(capsys, "--gpus", "1", "--model", str(small), "trainer.one_step_off=True")
    assert status == 1 and "on one GPU, an H200" in text and "one GPU cannot train and generate" in text


@pytest.mark.parametrize(
    ("given", "proposed"),
    [
        (["n_workers=0"], ["Proposed: colocated", "trainer.n_gpus_per_node=8"]),
        (["n_workers=4"], ["Proposed: 12 train + 4 generate", "trainer.nnodes=2", "trainer.n_gpus_per_node=6"]),
        (["n_workers=3"], ["No layout fits", "13 GPUs that train: they cannot be spread evenly over 2 machines of 8"]),
        (["n_workers=16"], ["No layout fits", "n_workers=16: none of 16 GPUs is left to train"]),
        (["colocated_workers=4"], ["Proposed: colocated (4 of 16 generate)", "rollout.colocated_workers=4"]),
        (["trainer.n_gpus_per_node=4"], ["Proposed: 8 train + 8 generate", "trainer.nnodes=2"]),
        (["trainer.nnodes=4"], ["Proposed: colocated", "trainer.n_gpus_per_node=4"]),
        (
            ["actor.strategy=megatron", "actor.megatron_config.pipeline_parallel_size=2"],
            ["megatron pipeline 2", "megatron_config.pipeline_parallel_size=2"],
        ),
        (
            ["actor.strategy=megatron", "actor.megatron_config.tensor_parallel_size=4"],
            ["No layout fits", "given sizes"],
        ),
        (["rollout.name=sglang", "rollout.tensor_model_parallel_size=2"], ["No layout fits", "devices is not built"]),
        (["rollout.name=vllm", "rollout.pipeline_model_parallel_size=2"], ["No layout fits", "compare layouts with"]),
    ],
)
def test_given_sizes_and_workers_stay(capsys, small, given, proposed):
    prefix = {"n_workers": "actor_rollout_ref.rollout.", "colocated_workers": "actor_rollout_ref.rollout."}
    prefix |= {"actor": "actor_rollout_ref.", "rollout": "actor_rollout_ref."}
    keys = [prefix.get(key.split(".")[0].split("=")[0], "") + key for key in given]
    gpus = ["--gpus", "8"] if given == ["n_workers=0"] else ["--gpus", "16"]
    if given == ["trainer.nnodes=4"]:
        gpus += ["--gpus_per_machine", "4"]
    _, text = said(capsys, *gpus, "--model", str(small), "data.max_response_length=512", *keys)
    for part in proposed:
        assert part in text, text[:1500]


def test_roles_on_workers_of_their_own_are_not_planned_over_many_gpus(small):
    own = ["algorithm.adv_estimator=gae", "critic.n_workers=2"]
    with pytest.raises(UserError, match=r"critic\.n_workers=2 is not planned over many GPUs"):
        plan_command.main(["--gpus", "8", "--model", str(small), *own])


def test_proposed_settings_are_those_of_a_run_that_starts(capsys, small):
    exact = ["trainer.exact=True", "data.max_response_length=512"]  # not built for other engines
    status, text = said(capsys, "--gpus", "16", "--model", str(small), *exact)
    lines = text[text.index("Proposed") : text.index("Memory of")].split("\n")[1:]
    proposed = [line.strip() for line in lines if line.strip()]
    path = f"actor_rollout_ref.model.path={small}"
    config = load_config([path, "algorithm.adv_estimator=grpo", "data.train_batch_size=512", *exact, *proposed]).config
    assert status == 0 and config.trainer.n_gpus_per_node * config.trainer.nnodes in (16, 8)
    assert config.actor_rollout_ref.actor.strategy.startswith("fsdp")


LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1024,
    "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 64,
    "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 512,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
WITHOUT_KEY_HEADS = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 2048}


def folder_of(place: Path, config: dict) -> str:
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def test_latents_are_cached_as_each_engine_keeps_them(tmp_path):
    model = costs_of(folder_of(tmp_path, LATENT), "actor_rollout_ref.model.dtype=bfloat16")
    assert model.cached(1, "vllm") == model.cached(2, "vllm") == model.cached(1) == 6 * 2 * (128 + 32)
    assert model.queries == 16 * (64 + 32 + 64) // 2 and model.keys == 16 * (64 + 32 + 64)


def test_mixtures_that_megatron_does_not_train_are_sharded_by_fsdp(tmp_path, capsys):
    path = folder_of(tmp_path, OSS)
    assert costs_of(path).picked == 2 and costs_of(path).chosen == 1 / 4
    status, text = said(capsys, "--gpus", "4", "--model", path, "data.max_response_length=512")
    assert status == 0 and "Proposed: colocated: fsdp" in text and "models of type gpt_oss" in text


def test_models_without_a_number_of_key_heads_are_planned(tmp_path, capsys):
    path = folder_of(tmp_path, WITHOUT_KEY_HEADS)
    lengths = ["data.max_prompt_length=128", "data.max_response_length=512"]
    assert said(capsys, "--gpus", "4", "--model", path, *lengths)[0] == 0


def test_what_does_not_fit_is_named_with_its_stage(capsys):
    small = ["--gpus", "1", "--model", "1.5b", "--gpu_gb", "16"]
    status, text = said(capsys, *small, "actor_rollout_ref.model.lora_rank=0")  # given: adapters are not tried
    assert status == 1 and "No layout fits." in text
    assert "colocated: fsdp; rollout native tensor 1: update takes" in text and "GiB of 14.40 GiB" in text


def test_where_no_layout_fits_adapters_and_more_gpus_are_tried(capsys):
    seven = ["--gpus", "1", "--model", "7b"]
    status, text = said(capsys, *seven)
    assert status == 1 and "lora_rank=32: colocated: fsdp" in text and "--gpus 2: colocated: fsdp" in text
    status, text = said(capsys, *seven, "actor_rollout_ref.model.lora_rank=0")  # given: it stays
    assert status == 1 and "lora_rank=32" not in text and "--gpus 2: colocated: fsdp" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpus", "8"], "name the model too"),
        (["--gpus", "8", "--model", "71b"], "--model 71b: unknown. Give a size (0.5b, 1.5b"),
        (["--gpus", "12", "--model", "7b"], "whole machines of 8 GPUs"),
        (["--gpus", "0", "--model", "7b"], "give a number above 0"),
        (["--gpus", "8", "--model", "7b", "--assume", "netwrk_gb_s=5"], "did you mean network_gb_s"),
        (["--gpus", "8", "--model", "7b", "--assume", "network_gb_s"], "give name=number"),
        (["--gpus", "8", "--model", "7b", "--assume", "network_gb_s=0"], "above 0"),
        (["--gpus", "8", "--model", "7b", "--mean_response", "9000"], "data.max_response_length=8192"),
        (["--gpus", "8", "--model", "7b", "--fast"], "--fast is neither"),
        (["--gpus", "x", "--model", "7b"], "argument --gpus"),
        (["--gpus", "8", "--model", "7b", "actor_rollout_ref.rollout.name=hf"], "name=hf is not planned"),
        (["--gpus", "8", "--model", "7b", "actor_rollout_ref.actor.fsdp_config.fsdp_size=4"], "fsdp_size=4 is not"),
        (["--gpus", "8", "--model", "7b", "actor.ulysses_sequence_parallel_size=2"], "parallel_size=2 is not planned"),
        (["--gpus", "8", "--model", "7b", "model.path=/tmp"], "--model names the model"),
        (["--gpus", "8", "--model", "7b", "model.dtype=float32"], "dtype=float32 is not planned"),
    ],
)
def test_wrong_arguments_are_rejected_in_words(args, words):
    with pytest.raises(UserError) as error:
        plan_command.main(args)
    assert words in str(error.value)


def test_workers_that_only_generate_hold_their_part_of_a_split_engine():
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_workers=8",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    with model_path("70b") as path:
        keys += [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.model.dtype=bfloat16"]
        keys += ["actor_rollout_ref.rollout.tensor_model_parallel_size=8", "trainer.n_gpus_per_node=8"]
        config = load_config([*keys, "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"]).config
        generate = RLPlanner().plan(config, H200).stages["generate"]
    assert generate["rollout weights"] == pytest.approx(2 * 70.55e9 / 8, rel=1e-3)
    assert generate["KV cache"] == pytest.approx(0.5 * H200.bytes - generate["rollout weights"], rel=1e-3)
