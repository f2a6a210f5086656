"""What `posttrain explain` answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posttrain.algorithms import AGGREGATION_MODES, KL_TYPES, registry
from posttrain.config.resolved import ConfigError
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.config.trees import COMMANDS
from posttrain.explain import ALIASES, _pages, explain


def flat(name: str | None) -> str:
    return " ".join(explain(name).split())


def test_grpo_gives_formula_source_settings_metrics_and_failures():
    page = flat("grpo")
    for part in (
        "A_i = (r_i - mean(r)) / (std(r) + epsilon)",
        "DeepSeekMath",
        "arXiv 2402.03300",
        "Settings:",
        "Watch:",
    ):
        assert part in page
    assert "Signs of failure:" in page


def test_grpo_says_distance_and_not_rank():
    assert "not the rank" in flat("grpo")
    assert "distance of its reward from the mean" in flat("grpo")


@pytest.mark.parametrize(("name", "part"), [("grpo", "rule can check"), ("ppo", "alignment"), ("gae", "alignment")])
def test_grpo_and_ppo_say_when_to_use_each(name, part):
    assert f"When to use: {'tasks' if name == 'grpo' else 'alignment'}" in flat(name)
    assert part in flat(name)


def test_drgrpo_gives_the_right_paper_and_says_what_lengthens_answers():
    page = flat("drgrpo")
    assert "arXiv 2503.20783" in page
    assert "2402.03300" not in page
    assert "lengthens wrong answers" in page


def test_the_original_papers_aggregation_comes_with_its_caveat():
    assert "Unstable for long reasoning" in flat("seq-mean-token-mean")


def test_spin_says_that_it_is_not_built_and_what_is_nearest():
    assert "not built" in flat("spin")
    assert "nearest is `grpo`" in flat("spin")


@pytest.mark.parametrize("name", ["rollout.n", "actor_rollout_ref.rollout.n", "rollout_n"])
def test_rollout_n_gives_the_rule_of_thumb_and_its_price(name):
    page = flat(name)
    for part in ("5 to 8", "doubling n about doubles", "gains shrink", "steadier", "in proportion"):
        assert part in page


def test_the_table_on_rollout_n_is_right():
    rows = {
        line.split("  ")[1].strip() or line: line.split() for line in explain("rollout.n").splitlines() if "  " in line
    }
    sizes = (2, 4, 5, 8, 16)
    spread = next(row for row in rows.values() if row[0] == "spread")
    assert [float(x) for x in spread[-5:]] == [round(0.5 / n**0.5, 3) for n in sizes]
    half, tenth = (row for row in rows.values() if row[0] == "groups")
    for row, p in ((half, 0.5), (tenth, 0.1)):
        assert [int(x) for x in row if x.isdigit()] == [round(100 * (1 - p**n - (1 - p) ** n)) for n in sizes]


@pytest.mark.parametrize("name", ["norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo"])
def test_taking_the_deviation_out_changes_weights_and_not_speed(name):
    assert "weighted by difficulty, not the speed" in flat(name)


def test_policy_loss_says_little():
    assert "says little" in flat("policy_loss")


@pytest.mark.parametrize("name", ["reward_mean", "reward_std", "kl_loss", "response_length", "actor/pg_clipfrac"])
def test_metrics_have_pages(name):
    assert explain(name).startswith(f"`{name}`: ")


def test_every_algorithm_mode_kl_type_and_loss_has_a_page():
    built = [*registry.ADV_ESTIMATORS, *registry.POLICY_LOSSES, *AGGREGATION_MODES]
    for name in [*built, *KL_TYPES, *(f"{kl}+" for kl in KL_TYPES)]:
        if not name.startswith("scalar_for"):
            assert len(explain(name)) > 60, name


@pytest.mark.parametrize("name", ["k3+", "low_var_kl+"])
def test_plus_is_explained(name):
    assert "keeps this value and has the gradient of `k2`" in flat(name)


def test_every_settings_key_answers_with_its_sentence_default_and_range():
    for key, leaf in leaves(PPOConfig).items():
        assert f"{key} (default " in explain(key)
        assert " ".join(leaf.sentence.split()) in flat(key)
        assert leaf.range is None or f"It must be {leaf.range.words}." in flat(key)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_settings_of_the_supervised_trainers_answer_too(command):
    table = leaves(COMMANDS[command].root)
    for key, leaf in table.items():
        page = explain(key)
        assert f"{key} (" in page and leaf.sentence in page, key
        assert f"default {'null' if leaf.default is None else leaf.default})" in page, key
    page = explain(command)
    assert f"posttrain {command} key=value" in page and f"posttrain config {command}" in page
    assert f"optim.lr (of posttrain {command}, default 1e-05)" in page


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("data.multiturn", "data.multiturn.messages_key (of posttrain sft, default messages)"),
        ("center_coef", "loss.center_coef (of posttrain reward-model, default 0.0)"),
        ("optim.lr", "optim.lr (of posttrain sft and posttrain reward-model, default 1e-05)"),
        ("reward_model_trainer", "Bradley-Terry"),
        ("val/perplexity", "exp(val/loss)"),
        ("lora", "`posttrain reward-model` the first six begin with `model.`"),
    ],
)
def test_what_belongs_to_the_supervised_trainers_is_found_by_its_names(name, words):
    assert words in flat(name)


def test_pages_name_only_settings_that_exist():
    import re

    for name, page in _pages().items():
        table = [*leaves(PPOConfig), *leaves(COMMANDS[name].root)] if name in COMMANDS else leaves(PPOConfig)
        heads = {key.split(".")[0] for key in table}
        for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", page):
            if key.split(".")[0] in heads and not key.endswith(".md"):
                known = any(k == key or k.startswith(key.rstrip(".") + ".") for k in table)
                assert known, f"{name} names {key}"


def test_the_end_of_a_key_or_a_section_is_enough():
    assert "actor_rollout_ref.actor.optim.lr" in explain("lr")
    assert "critic.optim.lr" in explain("lr")
    assert "algorithm.kl_ctrl.horizon" in explain("kl_ctrl")


def test_without_a_name_all_pages_are_listed_with_their_first_sentence():
    contents = explain(None)
    for name in [*_pages(), *ALIASES]:
        assert name in contents
    assert "GRPO: the advantage of a response" in contents


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ConfigError, match=r"no page on `grop`.*Nearest: grpo"):
        explain("grop")


def test_explaining_imports_no_torch():
    code = "import sys; from posttrain.explain import explain; explain('grpo'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
