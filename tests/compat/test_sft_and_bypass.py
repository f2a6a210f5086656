"""verl's data set of conversations, the loss of bypass mode, all tools of two files, and a score's two addresses."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config import load_config
from posttrain.protocol import DataProto
from posttrain.workers.actor.correction import mean_weight_over_ranks, needs_mean_weight
from posttrain.workers.actor.dp_actor import actor_objective
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode, get_policy_loss_fn
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class Letters:
    """Tokens are characters; a message is `role:content;`, behind a system prompt `S;` where there is none."""

    pad_token_id = 0

    def apply_chat_template(
        self, messages: list[Any], tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        own = "" if messages[0]["role"] == "system" else "S;"
        said = "".join(f"{one['role'][0]}:{one['content']};" for one in messages)
        return own + said + ("a:" if add_generation_prompt else "")

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in text]}

    def decode(self, ids: Any) -> str:
        return "".join(chr(one) for one in ids)


@pytest.fixture
def file(tmp_path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def talk(*words: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[turn % 2], "content": word} for turn, word in enumerate(words)]

    path = str(tmp_path / "talks.parquet")
    pq.write_table(pa.table({"messages": [talk("hi", "yo", "and", "so"), talk("q", "w")]}), path)
    return path


def test_what_the_assistant_wrote_is_trained(file: str) -> None:
    rows = MultiTurnSFTDataset(file, Letters(), {"pad_mode": "no_padding", "max_length": 64})
    row = rows[0]
    text = Letters().decode(row["input_ids"].tolist())
    assert len(rows) == 2 and text == "S;u:hi;a:yo;u:and;a:so;"
    assert "".join(c if m else "." for c, m in zip(text, row["loss_mask"], strict=True)) == ".........yo;........so;"
    assert row["position_ids"].tolist() == list(range(len(text)))


def test_rows_are_padded_or_cut_to_a_length(file: str) -> None:
    padded = MultiTurnSFTDataset([file], Letters(), {"max_length": 12}, max_samples=2)[1]
    assert padded["attention_mask"].tolist() == [1] * 10 + [0] * 2 and padded["input_ids"].tolist()[-2:] == [0, 0]
    with pytest.raises(ValueError, match="sequence_length=10 is larger"):
        MultiTurnSFTDataset(file, Letters(), {"max_length": 8})[1]
    cut = {
        side: MultiTurnSFTDataset(file, Letters(), {"max_length": 4, "truncation": side})[1]
        for side in ("left", "right")
    }
    texts = {side: Letters().decode(row["input_ids"].tolist()) for side, row in cut.items()}
    assert texts == {"left": "a:w;", "right": "S;u:"}


def test_a_template_that_shows_turns_differently_is_rejected(file: str) -> None:
    class Forgets(Letters):
        def apply_chat_template(self, messages: list[Any], *args: Any, **options: Any) -> str:
            shown = messages if len(messages) < 4 else messages[2:]
            return super().apply_chat_template(shown, *args, **options)

    with pytest.raises(AssertionError, match="ignore_input_ids_mismatch"):
        MultiTurnSFTDataset(file, Forgets(), {})[0]
    assert MultiTurnSFTDataset(file, Forgets(), {"ignore_input_ids_mismatch": True})[0]["loss_mask"].sum() == 6


@pytest.mark.parametrize("chosen", [{}, {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.5}])
def test_bypass_mode_compares_with_the_rollout(chosen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    old, new, advantages = (torch.randn(2, 3) for _ in range(3))
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    config = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "policy_loss": {"rollout_correction": chosen}}
    loss, metrics = compute_policy_loss_bypass_mode(old, new, advantages, mask, "token-mean", config)
    ratio = (new - old).exp()
    if chosen:
        each = -advantages * new * ratio.clamp(max=1.5)
    else:
        worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        each = torch.where(advantages < 0, torch.minimum(worst, -3.0 * advantages), worst)
    assert float(loss) == pytest.approx(float((each * mask).sum() / 5), abs=1e-6)
    assert "rollout_corr/kl" in metrics and get_policy_loss_fn("bypass_mode") is compute_policy_loss_bypass_mode
    with pytest.raises(ValueError, match="loss_type"):
        config["policy_loss"]["rollout_correction"] = {"loss_type": "other"}
        compute_policy_loss_bypass_mode(old, new, advantages, mask, "token-mean", config)


@pytest.mark.parametrize(
    "chosen",
    [
        {"rollout_is": "token"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.4},
        {"loss_type": "reinforce", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05},
        {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    ],
)
def test_the_update_of_a_run_has_the_loss_of_verls_bypass_mode(chosen: dict[str, Any]) -> None:
    torch.manual_seed(1)
    old, advantages = torch.randn(6, 4), torch.randn(6, 4)
    new, mask = old + 0.3 * torch.randn(6, 4), (torch.rand(6, 4) > 0.2).float()
    section = {"bypass_mode": True, **chosen}
    settings = load_config([f"algorithm.rollout_correction.{name}={value}" for name, value in section.items()]).config
    actor, correction = settings.actor_rollout_ref.actor, settings.algorithm.rollout_correction
    run = actor_objective(actor, correction, 4)
    tensors = {"old_log_probs": old, "rollout_log_probs": old, "advantages": advantages, "response_mask": mask}
    mini = run.prepare(DataProto.from_dict(tensors))
    if needs_mean_weight(actor, correction):
        run.mean_weight = mean_weight_over_ranks(new, mini.batch, correction)
    ours = run(mini, {"log_probs": new, "entropy": torch.zeros_like(new)})
    # verl counts the tokens of the whole mini-batch before rejection, too.
    counts = {"batch_num_tokens": int(mask.sum())}
    config = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "global_batch_info": counts, "policy_loss": {}}
    config["policy_loss"]["rollout_correction"] = chosen
    theirs, _ = compute_policy_loss_bypass_mode(old, new, advantages, mask, "token-mean", config)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


def test_tools_of_both_files_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_tool_class.py").write_text(
        "class Tool:\n    def __init__(self, config, tool_schema):\n"
        "        self.name, self.size = tool_schema.function.name, config['size']\n"
    )
    schema = "{type: function, function: {name: NAME, description: d, parameters: {type: object, properties: {}}}}"
    entry = "{class_name: own_tool_class.Tool, config: {type: native, size: 3}, tool_schema: " + schema + "}"
    (tmp_path / "tools.yaml").write_text(f"tools: [{entry.replace('NAME', 'search')}]")
    (tmp_path / "clash.yaml").write_text(f"tools: [{entry.replace('NAME', 'double')}]")
    (tmp_path / "functions.py").write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool\n"
        "def double(text: str) -> str:\n    '''Twice.\n\n    Args:\n        text: text.\n    '''\n    return text * 2\n"
    )
    functions = str(tmp_path / "functions.py")
    try:
        tools = load_all_tools(str(tmp_path / "tools.yaml"), functions)
        assert [tool.name for tool in tools] == ["search", "double"] and tools[0].size == 3
        with pytest.raises(ValueError, match="double"):
            load_all_tools(str(tmp_path / "clash.yaml"), functions)
    finally:
        FUNCTION_TOOL_REGISTRY.clear()


def test_a_score_is_one_function_at_both_addresses() -> None:
    package = importlib.import_module("verl.utils.reward_score")
    before = package.gsm8k_reward
    assert importlib.import_module("verl.utils.reward_score.gsm8k_reward") is before is package.gsm8k_reward
    assert before("so #### 5", "5") == 1.0


def test_responses_that_are_missing_count_as_wrong() -> None:
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    columns: dict[str, Any] = {"acc": [1.0, 1.0, None], "reward": [0.5, 1.0, 2.0]}
    counts = {("a", "x"): 4, ("b", "y"): 2}
    found = process_validation_metrics(["a", "a", "b"], ["x", "x", "y"], columns, expected_acc_counts=counts)
    assert found["a"]["acc"]["mean@4"] == 0.5 and found["a"]["acc_success_only"]["mean@2"] == 1.0
    assert found["a"]["reward"]["mean@2"] == 0.75
    assert "acc" not in found["b"] and found["b"]["reward"]["mean@1"] == 2.0
