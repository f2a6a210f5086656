"""Document 3: its data, commands, recipes and reward files, run as `train.sh` runs them (with a small model)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from seen import DOCUMENT_3, Seen, groups

SHORT = ("--epochs", "1")
LENGTH_REWARD = Path(__file__).parent / "length_reward.py"


def per_prompt(seen: Seen) -> Counter[int]:
    """How many prompts of the first step have how many samples."""
    return Counter(map(len, groups(seen.samples()).values()))


def test_a_json_list_is_trained_on_with_five_samples_per_prompt_by_default(train_sh):
    seen = train_sh(*SHORT)
    assert seen.status == 0 and per_prompt(seen) == {5: 4}
    texts = {row["prompt"]: row for row in seen.samples()}
    for row in DOCUMENT_3:
        sample = texts[f"<|user|>{row['prompt']}<|end|><|assistant|>"]  # one user message, by the chat template
        assert (sample["ground_truth"], sample["data_source"]) == (row["ground_truth"], row["data_source"])


def test_under_grpo_there_is_no_critic(train_sh):
    seen = train_sh(*SHORT)
    assert seen.trainer.critic_wg is None and ", critic" not in seen.console
    assert "Using advantage estimator: grpo" in seen.log
    assert "values" not in seen.trainer.batches[0].batch


def test_the_same_run_with_gae_has_a_critic_whose_values_enter_the_advantages(train_sh):
    keys = ("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "critic.optim.lr=1e-2")
    seen = train_sh("--epochs", "4", "--reward_func", str(LENGTH_REWARD), *keys)
    assert seen.trainer.critic_wg is not None and per_prompt(seen) == {1: 4}
    assert all(line["critic/vf_loss"] > 0 for line in seen.steps if line["reward_mean"] > 0)
    batch = seen.trainer.batches[-1].batch  # values are 0 until the critic has met a reward
    real = batch["response_mask"].bool()
    gain = (batch["token_level_rewards"].sum(-1, keepdim=True) - batch["values"])[real]  # gamma = lambda = 1
    assert batch["values"][real].std() > 0
    whitened = (gain - gain.mean()) / gain.std()
    assert torch.allclose(batch["advantages"][real], whitened, atol=1e-4)


def test_an_unknown_source_is_an_error_that_lists_the_known_ones_before_training(train_sh, tmp_path):
    path = tmp_path / "poems.json"
    path.write_text(json.dumps([{"prompt": "a", "ground_truth": "b", "data_source": "poems"}] * 4))
    reward = "custom_reward_function.path=null"  # the built-in scorers themselves
    with pytest.raises(Exception, match=r"poems[\s\S]*math_reasoning") as caught:
        train_sh(*SHORT, f"data.train_files={path}", reward)
    assert "gsm8k" in str(caught.value)


def test_to_S3_13_model_rollout_n_and_epochs_together(train_sh, brief_model):
    seen = train_sh("--rollout_n", "8", "--epochs", "20")
    assert seen.status == 0 and per_prompt(seen) == {8: 4}
    assert [line["step"] for line in seen.steps] == list(range(1, 21))
    assert seen.config["actor_rollout_ref"]["model"]["path"] == str(brief_model)
    assert seen.config["actor_rollout_ref"]["rollout"]["n"] == 8 and seen.config["trainer"]["total_epochs"] == 20


RECORDING = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({path!r}, "a") as file:
        file.write(json.dumps([data_source, solution_str, ground_truth, extra_info]) + "\\n")
    return len(solution_str) % 3
"""


@pytest.fixture(scope="module")
def recorded(train_sh, tmp_path_factory) -> tuple[Seen, list[list]]:
    """A run with `--reward_func ./my_reward.py`, and the arguments of every call of it."""
    folder = tmp_path_factory.mktemp("reward")
    calls, data = folder / "calls.jsonl", folder / "train.json"
    (folder / "my_reward.py").write_text(RECORDING.format(path=str(calls)))
    rows = [{**row, "level": number, "extra_info": {"by": "me"}} for number, row in enumerate(DOCUMENT_3)]
    data.write_text(json.dumps(rows))
    seen = train_sh("--epochs", "2", "--reward_func", str(folder / "my_reward.py"), f"data.train_files={data}")
    return seen, [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_function_of_the_file_is_called_for_every_response(recorded):
    seen, calls = recorded
    assert seen.status == 0 and len(calls) == 2 * 4 * 5
    for step in (1, 2):
        assert all(row["score"] == len(row["response"]) % 3 for row in seen.samples(step))


def test_its_arguments_are_the_rows_values_and_the_decoded_response(recorded):
    seen, calls = recorded
    samples = seen.samples(1) + seen.samples(2)
    wanted = Counter((row["data_source"], row["response"], row["ground_truth"]) for row in samples)
    assert Counter((source, text, truth) for source, text, truth, _ in calls) == wanted
    tokenizer = seen.trainer.tokenizer
    for row in samples:
        assert row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
    assert not any("<|" in text or "user" in text for _, text, *_ in calls)


def test_extra_info_holds_the_rows_own_and_its_other_columns(recorded):
    _, calls = recorded
    assert Counter(extra["level"] for *_, extra in calls) == {0: 10, 1: 10, 2: 10, 3: 10}
    assert {extra["by"] for *_, extra in calls} == {"me"}


def test_a_file_with_no_function_to_take_is_an_error_before_training(train_sh, tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("a = 1\n")
    with pytest.raises(Exception, match=r"my_reward\.py[\s\S]*compute_score"):
        train_sh(*SHORT, "--reward_func", str(file))


def test_outputs_checkpoints_leads_to_the_newest_model_which_loads_with_transformers(train_sh):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen = train_sh(*SHORT)
    link = seen.path.parents[1] / "checkpoints"
    assert link.parent.name == "outputs" and link.resolve() == (seen.path / "checkpoints").resolve()
    newest = max(link.glob("global_step_*"), key=lambda path: int(path.name[12:])) / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(newest)
    ours = seen.trainer.actor_rollout_wg.worker.engine.module.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(newest).decode([258]) == "<|user|>"


def test_the_environment_variable_sets_the_samples_per_prompt(train_sh):
    assert per_prompt(train_sh(*SHORT, ROLLOUT_N="3")) == {3: 4}


def test_without_the_kl_loss_no_reference_is_loaded(train_sh):
    on, off = train_sh(*SHORT), train_sh(*SHORT, USE_KL_LOSS="false")
    assert on.trainer.actor_rollout_wg.worker.reference.engine is not None and "kl_loss" in on.steps[0]
    assert off.trainer.actor_rollout_wg.worker.reference.engine is None and "kl_loss" not in off.steps[0]


@pytest.mark.parametrize(
    "n", [pytest.param(3, id="S3-27 S3-57"), pytest.param(8, id="S3-29"), pytest.param(12, id="S3-30")]
)
def test_this_number_of_responses_per_prompt_runs(train_sh, n):
    seen = train_sh(*SHORT, "--rollout_n", str(n))
    assert seen.status == 0 and per_prompt(seen) == {n: 4}


def test_generated_tokens_grow_in_proportion_to_n_and_the_time_is_printed(small):
    """What n costs in seconds is measured by hand: a test that asserts times fails on a busy machine."""
    tokens = {}
    for n in (3, 6):
        seen = small(actor_rollout_ref__rollout__n=n, actor_rollout_ref__rollout__ignore_eos=True)
        tokens[n] = sum(len(row["response_ids"]) for row in seen.samples(2))
        line = next(line for line in seen.console.splitlines() if line.startswith("step 2/"))
        assert re.search(r", \d+\.\d s(,|$)", line), line
        assert seen.steps[1]["timing_s/gen"] > 0
    assert tokens[6] == 2 * tokens[3] > 0


def test_an_offloaded_reference_gives_the_same_numbers_and_a_cpu_run_says_it_has_no_effect(small):
    more = {"actor_rollout_ref__actor__use_kl_loss": True, "trainer__device": "cpu"}
    plain = small(**more)
    offloaded = small(**more, actor_rollout_ref__ref__fsdp_config__param_offload=True)
    for step in (1, 2):
        for ours, theirs in zip(plain.samples(step), offloaded.samples(step), strict=True):
            assert ours["ref_log_probs"] == theirs["ref_log_probs"] and len(ours["ref_log_probs"]) == 6
    assert "param_offload has no effect: the run is on the CPU" in offloaded.log


def test_adapters_of_rank_8_and_scale_2_change_and_the_base_does_not_by_a_bit(train_sh, brief_model):
    from peft.tuners.lora import LoraLayer
    from safetensors.torch import load_file

    keys = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
    seen = train_sh("--epochs", "2", "--lr", "1e-2", "--reward_func", str(LENGTH_REWARD), *keys)
    assert seen.status == 0
    module = seen.trainer.actor_rollout_wg.worker.engine.module
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    assert len(layers) == 14  # 7 linear layers in each of 2 blocks
    assert {layer.r["default"] for layer in layers} == {8} and {layer.scaling["default"] for layer in layers} == {2.0}
    assert {layer.lora_A["default"].weight.shape[0] for layer in layers} == {8}
    moved = [float(layer.lora_B["default"].weight.detach().abs().max()) for layer in layers]
    assert min(moved) > 1e-3  # they start at 0
    base = {name.replace(".base_layer", ""): w for name, w in module.get_base_model().state_dict().items()}
    stored = load_file(brief_model / "model.safetensors")
    assert all(torch.equal(base[name], tensor) for name, tensor in stored.items()) and len(stored) > 10


def test_an_unknown_key_gives_the_error_of_main_ppo(train_sh, capsys, monkeypatch):
    import sys

    from posttrain.config import ConfigError
    from posttrain.trainer import main_ppo

    with pytest.raises(ConfigError) as caught:
        train_sh("actor_rollout_ref.model.lora_rnk=8")
    monkeypatch.setattr(sys, "argv", ["main_ppo", "actor_rollout_ref.model.lora_rnk=8"])
    assert main_ppo.cli() == 2
    known = "`actor_rollout_ref.model.lora_rank`"
    assert known in str(caught.value) and known in capsys.readouterr().err
