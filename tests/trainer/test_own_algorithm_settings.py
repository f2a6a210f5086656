"""A loss and an estimator of the user's own, in a file outside of the product, declare settings like built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from light_rewards import even_share
from runs import metrics_of, run

from posttrain.algorithms.common import AlgorithmError
from posttrain.config import ConfigError, load_config
from posttrain.explain import explain

FILE = '''"""My bounded REINFORCE. Negative responses count up to a bounded ratio.

    loss = -A * stop_gradient(min(ratio, my_bound)) * log_prob     where A < 0, else -A * log_prob

Settings: actor_rollout_ref.actor.policy_loss.my_bound.
"""

from dataclasses import dataclass

from posttrain.algorithms import register_adv_est, register_policy_loss
from posttrain.settings import POSITIVE, setting


@dataclass
class MyBoundedSettings:
    my_bound: float = setting(2.0, range=POSITIVE)
    """Largest ratio of a token with a negative advantage in `my_bounded`."""
    my_side: str = setting("negative", choices=("negative", "both"))
    """Where the ratio is bounded."""


@register_policy_loss(
    "my_bounded", settings=MyBoundedSettings, reads=(), metrics={"actor/my_share": "Share of tokens at my_bound."}
)
def compute_my_bounded(old_log_prob, log_prob, advantages, response_mask, my_bound, my_side, **kwargs):
    ratio = (log_prob - old_log_prob).exp().detach()
    is_bounded = (ratio > my_bound).float()
    weight = ratio.clamp(max=my_bound).where(advantages < 0, 1.0) if my_side == "negative" else ratio
    return -advantages * weight * log_prob, {"actor/my_share": is_bounded, "actor/my_bound": my_bound}


@dataclass
class CentredSettings:
    centred_scale: float = setting(1.0, range=POSITIVE)
    """Factor of the advantages of `centred`."""


@register_adv_est("centred", settings=CentredSettings, reads=())
def compute_centred(token_level_rewards, response_mask, centred_scale, **kwargs):
    scores = token_level_rewards.sum(-1, keepdim=True)
    advantages = centred_scale * (scores - scores.mean()) * response_mask
    return advantages, advantages
'''
BOUND = "my_bound: float = setting(2.0, range=POSITIVE)"
ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
TINY = ["actor_rollout_ref.model.path=embedded", "data.train_files=embedded", "algorithm.adv_estimator=grpo"]
MY_BOUNDED = [*TINY, f"{LOSS}.loss_mode=my_bounded"]


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bounded.py").write_text(FILE)
    return "actor_rollout_ref.model.external_lib=my_bounded.py"


def problem(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(args))
    return str(caught.value)


def test_a_value_out_of_range_is_rejected_with_the_usual_message(file):
    said = problem(*MY_BOUNDED, file, f"{LOSS}.my_bound=-5")
    assert f"`{LOSS}.my_bound=-5.0` is out of range: it must be above 0." in said
    assert "give a value that is above 0 (Largest ratio of a token with a negative advantage in `my_bounded`.)" in said
    said = problem(*MY_BOUNDED, file, f"{LOSS}.my_bound=wide", f"{LOSS}.my_side=negativ")
    assert f"`{LOSS}.my_bound`: expected a number, got 'wide'" in said
    assert f"`{LOSS}.my_side=negativ` is not known; known: negative, both." in said and "`negative`?" in said
    said = problem(*TINY[:2], "algorithm.adv_estimator=centred", "algorithm.centred_scale=0")
    assert "`algorithm.centred_scale=0.0` is out of range: it must be above 0." in said


def test_a_misspelt_one_is_answered_with_the_nearest(file):
    assert f"did you mean `{LOSS}.my_bound`?" in problem(*MY_BOUNDED, file, f"{LOSS}.my_bund=1")


def test_a_name_that_a_built_in_loss_has_is_rejected_in_one_sentence(file, tmp_path):
    (tmp_path / "my_bounded.py").write_text(FILE.replace('"my_bounded", ', '"dro", '))
    said = problem(*MY_BOUNDED, file, f"{LOSS}.my_bound=1")
    assert "The policy loss `dro` is already registered by posttrain.algorithms.losses.dro." in said
    assert "Register it under another one.\n" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("@dataclass\nclass MyB", "class MyB", "MyBoundedSettings of the policy loss `my_bounded` is no dataclass"),
        ("settings=MyBoundedSettings,", "settings=MyBoundedSettings(),", "policy loss `my_bounded` is no dataclass"),
        (
            "centred_scale: float = setting(1.0, range=POSITIVE)",
            "centred_scale: float",
            "centred_scale` of CentredSettings in {file} (the advantage estimator `centred`) has no default",
        ),
        (BOUND, "my_bound = 2.0", "(the policy loss `my_bounded`) has no type: write it as `my_bound: TYPE"),
        (BOUND, "my_bound = setting(2.0)", "{file}, line 14: TypeError: 'my_bound' is a field but has no type"),
        (BOUND, "my_bound: list[float] = [1.0]", "{file}, line 14: ValueError: mutable default <class 'list'>"),
        (BOUND, "b: list[float] = setting([1.0])", "{file}, line 16: TypeError: setting([1.0]): all runs would"),
        (BOUND, "b: float = setting(2.0, range=(0, 1))", "{file}, line 16: TypeError: setting(range=(0, 1)): a range"),
        ('("negative", "both")', '"negative"', "{file}, line 18: TypeError: setting(choices='negative'): choices"),
        (BOUND, "log_prob: float = 2.0", "`my_bounded`) has the name of an argument that the function gets anyway"),
    ],
)  # fmt: skip
def test_settings_that_are_declared_wrongly_are_named(file, tmp_path, old, new, said):
    assert old in FILE
    path = tmp_path / "my_bounded.py"
    path.write_text(FILE.replace(old, new))
    assert said.format(file=path) in problem(*MY_BOUNDED, file)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("my_bound: float = setting(-2.0, range=POSITIVE)", "has the default -2.0, which is out of its own range"),
        ('my_bound: str = setting("c", choices=("a", "b"))', "has the default 'c', which is none of its choices"),
        ('my_bound: float = setting("2", range=POSITIVE)', "has the default '2', but its type is a number: change the"),
        ("my_bound: int = 2.5", "has the default 2.5, but its type is an integer: change the default or the type"),
        ("my_bound: bool = 1", "has the default 1, but its type is true or false"),
        ("my_bound: str = True", "has the default True, but its type is text"),
        ("my_bound: float = None", "has the default None: add `| None` to its type, or give another default"),
        ("my_bound: list[float] = setting(factory=dict)", "has the default {}, but its type is a list of numbers"),
        ("my_bound: list[float] = setting(factory=lambda: 1 / 0)", "has a factory that failed (ZeroDivisionError: div"),
        ("my_bound: 'Foo' = 2.0", "has an unknown type (name 'Foo' is not defined): declare it as float, int"),
        ("my_bound: tuple = (1, 2)", "has the type tuple, which settings do not have: use float, int, bool, str, list"),
        ('my_bound: str = setting("a", range=POSITIVE)', "has a range that its default 'a' cannot be compared with"),
        ("my_bound: float = setting(2.0, choices=('a',))", "has choices=('a',) and the type a number: choices are"),
    ],
)  # fmt: skip
def test_a_default_that_its_own_declaration_rejects_is_named_with_its_file_class_and_setting(file, tmp_path, new, said):
    """Also under another loss: it is a mistake in the file, and none in the command."""
    path = tmp_path / "my_bounded.py"
    path.write_text(FILE.replace(BOUND, new))
    for command in (MY_BOUNDED, TINY):
        with pytest.raises(AlgorithmError) as caught:
            load_config([*command, file])
        assert f"The setting `my_bound` of MyBoundedSettings in {path} {said}" in str(caught.value)


@pytest.mark.parametrize(
    "new",
    ["my_bound: float = 2", "my_bound: float | None = None", "my_bound: list[int] = setting(factory=lambda: [1, 2])"],
)
def test_defaults_that_fit_their_types_are_taken(file, tmp_path, new):
    (tmp_path / "my_bounded.py").write_text(FILE.replace(BOUND, new))
    load_config([*MY_BOUNDED, file])


@pytest.mark.parametrize(("name", "owner"), [("tau_pos", "SAPOSettings"), ("loss_mode", "PolicyLossConfig")])
def test_a_setting_whose_name_is_taken_is_rejected_as_it_would_mean_both(file, tmp_path, name, owner):
    (tmp_path / "my_bounded.py").write_text(FILE.replace("my_bound:", f"{name}:"))
    with pytest.raises(
        AlgorithmError, match=rf"`{name}` of MyBoundedSettings in .*my_bounded\.py is declared by {owner} in"
    ):
        load_config([*MY_BOUNDED, file])


def test_losses_that_share_a_class_of_settings_both_read_them(file, tmp_path):
    second = FILE[FILE.index("@register_policy_loss") : FILE.index("@dataclass\nclass Centred")]
    second = second.replace('"my_bounded"', '"my_bounded_too"').replace("compute_my_bounded", "compute_too")
    (tmp_path / "my_bounded.py").write_text(FILE + "\n\n" + second)
    for loss in ("my_bounded", "my_bounded_too"):
        notes = load_config([*TINY, file, f"{LOSS}.loss_mode={loss}", f"{LOSS}.my_bound=3"]).notes
        assert not [note for note in notes if "my_bound has no effect" in note]


def test_without_its_file_the_key_is_unknown(tmp_path):
    (tmp_path / "my_bounded.py").unlink()
    assert f"Unknown key `{LOSS}.my_bound`." in problem(*TINY, f"{LOSS}.my_bound=1")


def test_settings_of_others_that_it_does_not_read_have_no_effect(file):
    notes = load_config([*MY_BOUNDED, file, f"{ACTOR}.clip_ratio=0.3", f"{LOSS}.dro_beta=2"]).notes
    assert f"{ACTOR}.clip_ratio has no effect: the policy loss my_bounded reads no clip ratio." in notes
    assert f"{LOSS}.dro_beta has no effect: {LOSS}.loss_mode is not dro." in notes


def test_its_settings_under_another_loss_have_no_effect(file):
    wanted = f"{LOSS}.my_bound has no effect: {LOSS}.loss_mode is not my_bounded."
    assert wanted in load_config([*TINY, file, f"{LOSS}.my_bound=3"]).notes


def test_its_settings_may_stand_in_a_yaml_file(file, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "actor_rollout_ref:\n  actor:\n    policy_loss: {loss_mode: my_bounded, my_bound: -1}\n"
    )
    assert "my_bound=-1.0` is out of range" in problem("--config-path", ".", "--config-name", "run", *TINY, file)


def test_the_file_is_found_in_the_working_folder_and_values_are_in_the_tree():
    resolved = load_config([*MY_BOUNDED, f"{LOSS}.my_bound=3"])
    assert resolved.value(f"{LOSS}.my_bound") == 3.0 and resolved.value(f"{LOSS}.my_side") == "negative"
    assert resolved.config.to_dict()["actor_rollout_ref"]["actor"]["policy_loss"]["my_bound"] == 3.0


def test_explain_has_the_page_of_the_loss_with_its_settings_and_metrics():
    page = explain("my_bounded")
    assert page.startswith("My bounded REINFORCE.")
    assert f"{LOSS}.my_bound (default 2.0)\n    Largest ratio of a token" in page
    assert "\n    It must be above 0." in page
    assert explain("actor/my_share") == "`actor/my_share`: Share of tokens at my_bound."
    assert "Factor of the advantages of `centred`." in explain("algorithm.centred_scale")


def test_a_loss_may_declare_how_it_is_aggregated_and_where_old_log_probs_come_from(tmp_path):
    declared = 'loss_agg_mode="seq-mean-token-sum", old_log_probs="rollout"'
    (tmp_path / "my_bounded.py").write_text(FILE.replace("settings=MyB", f"{declared}, settings=MyB", 1))
    resolved = load_config(MY_BOUNDED)
    assert resolved.value(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum"
    assert resolved.value(f"{ACTOR}.old_log_probs") == "rollout"
    assert resolved.sources[f"{ACTOR}.loss_agg_mode"] == "default (under my_bounded)"
    resolved = load_config([*MY_BOUNDED, f"{ACTOR}.loss_agg_mode=token-mean", f"{ACTOR}.old_log_probs=trainer"])
    assert resolved.value(f"{ACTOR}.loss_agg_mode") == "token-mean"
    assert "loss_agg_mode=seq-mean-token-sum; here: token-mean" in " ".join(resolved.notes)


def test_it_trains_a_step_with_its_settings(tiny_model, sums, tmp_path):
    result = run(
        tiny_model,
        sums,
        tmp_path,
        reward=even_share,
        algorithm__adv_estimator="centred",
        algorithm__centred_scale=0.5,
        actor_rollout_ref__actor__policy_loss__loss_mode="my_bounded",
        actor_rollout_ref__actor__policy_loss__my_bound=1.5,
        actor_rollout_ref__model__external_lib=str(tmp_path / "my_bounded.py"),
        trainer__total_training_steps=1,
    )
    line = metrics_of(result.path)[0]
    assert result.status == "finished" and line["actor/my_bound"] == 1.5 and "actor/my_share" in line
    assert "my_bound: 1.5" in (result.path / "config.yaml").read_text()
