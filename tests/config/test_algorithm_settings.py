"""Settings of the algorithms: presets with their source, spellings of other systems, what is refused, what is idle."""

import pytest

from posttrain.config import load_config
from posttrain.config.choices import PRESETS
from posttrain.config.resolved import ConfigError
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Section, leaves, lookup

ALGORITHMS = [name.split("/")[1] for name in PRESETS if name.startswith("algorithm/")]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_shows_its_values_and_where_they_come_from(name):
    resolved = load_config([f"algorithm={name}"])
    text = resolved.describe()
    for key, value in PRESETS[f"algorithm/{name}"][1].items():
        assert lookup(resolved.config, key) == value
        assert any(line.startswith(f"{key}: ") and line.endswith(f"# preset {name}") for line in text.splitlines()), key


def test_a_preset_gives_way_to_the_command_line():
    assert load_config(["algorithm=dapo", "actor_rollout_ref.rollout.n=4"]).config.actor_rollout_ref.rollout.n == 4


@pytest.mark.parametrize(
    "prefix",
    [
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_other_spellings_of_the_overlong_buffer_are_read(prefix):
    config = load_config([f"+{prefix}.enable=True", f"+{prefix}.len=2", f"+{prefix}.penalty_factor=0.5"]).config
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 2, 0.5)


def test_thresholds_are_numbers_or_ranges():
    key = "algorithm.rollout_correction"
    config = load_config([f"{key}.rollout_is=token", f"{key}.rollout_is_threshold=0.5_5.0"]).config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_5.0"
    config = load_config([f"{key}.rollout_is=token", f"{key}.rollout_is_threshold=3"]).config
    assert float(config.algorithm.rollout_correction.rollout_is_threshold) == 3.0


WRONG = {
    "rule": (["algorithm.rollout_correction.rollout_rs=seq_k3"], ["`seq_k3` is not known", "seq_mean_k3"]),
    "no threshold": (["algorithm.rollout_correction.rollout_rs=seq_mean_k3"], ["one threshold per name"]),
    "no range": (
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=0"],
        ["is not a threshold"],
    ),
    "buffer": (
        ["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=90", "data.max_response_length=80"],
        ["overlong_buffer.len=90", "at most 80"],
    ),
    "filter of single responses": (
        ["algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=True"],
        ["one response per prompt"],
    ),
    "codapo with dynamic sampling": (
        ["algorithm.adv_estimator=codapo", "algorithm.filter_groups.enable=True"],
        ["codapo chooses the next step's prompts", "algorithm.filter_groups.enable=False"],
    ),
    "codapo one step off": (
        ["algorithm.adv_estimator=codapo", "trainer.one_step_off=True", "actor_rollout_ref.rollout.n_workers=1"],
        ["codapo chooses the next step's prompts", "trainer.one_step_off=False"],
    ),
    "gdpo with KL in the reward": (
        ["algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=True"],
        ["would be lost"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused(name):
    args, parts = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        load_config(args)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"], False),
        (["actor_rollout_ref.rollout.top_p=0.9"], False),
        (["actor_rollout_ref.actor.old_log_probs=trainer"], False),
    ],
)
def test_weights_that_only_losses_without_a_ratio_use_are_noted(more, said):
    given = ["algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.actor.old_log_probs=rollout"]
    assert any("measured and not applied" in note for note in load_config([*given, *more]).notes) == said


def test_cppo_compares_with_the_rollout_unless_told_otherwise():
    old, loss = "actor_rollout_ref.actor.old_log_probs", "actor_rollout_ref.actor.policy_loss.loss_mode=cppo"
    assert (
        load_config([loss]).value(old) == "rollout" and load_config([loss.replace("cppo", "gspo")]).value(old) == "auto"
    )
    assert load_config([loss, f"{old}=trainer"]).value(old) == "trainer"
    # Its ratio is the one to the rollout, so that older responses need no importance weights.
    off = ["trainer.one_step_off=True", "actor_rollout_ref.rollout.n_workers=1"]
    assert load_config([loss, *off]).value("algorithm.rollout_correction.rollout_is") is None


@pytest.mark.parametrize(
    ("more", "clips_around_samples"),
    [
        ([], True),
        (["trainer.max_staleness=1"], False),
        (["data.train_batch_size=20"], False),  # two updates a step
        (["actor_rollout_ref.actor.ppo_epochs=2"], False),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"], False),  # clips nothing
        (["actor_rollout_ref.actor.old_log_probs=trainer"], False),
        (["algorithm.rollout_correction.rollout_is=token"], False),
        (["algorithm.rollout_correction.rollout_is_threshold=3"], False),
        (["actor_rollout_ref.rollout.top_p=0.9"], False),  # only importance weights correct for filters
        (["algorithm.adv_estimator=optimal_token_baseline"], False),  # compares old log-probs with the trainer's sums
    ],
)
def test_a_step_of_one_update_with_old_samples_is_clipped_around_the_policies_that_sampled(more, clips_around_samples):
    old, weights = "actor_rollout_ref.actor.old_log_probs", "algorithm.rollout_correction.rollout_is"
    given = ["preset=embedded", "actor_rollout_ref.rollout.n_workers=1", "trainer.max_staleness=2"]
    sizes = ["data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=10"]
    resolved = load_config([*given, *sizes, *more])
    assert (resolved.value(old) == "rollout") == clips_around_samples
    assert any(f"{old}=rollout under trainer.max_staleness" in note for note in resolved.notes) == clips_around_samples
    # Otherwise importance weights correct for the older policies, unless something else is set.
    expected = None if clips_around_samples or f"{old}=trainer" in more else "token"
    assert resolved.value(weights) == expected


IDLE = {
    "actor_rollout_ref.actor.policy_loss.dro_beta=2": "loss_mode is not dro",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable is False",
    "reward.overlong_buffer.len=5": "reward.overlong_buffer.enable is False",
    "algorithm.gdpo_reward_keys=[a]": "only the estimator gdpo",
    "algorithm.rollout_correction.rollout_rs_threshold=0.1": "rollout_rs is null",
}


@pytest.mark.parametrize("setting", IDLE)
def test_settings_without_effect_are_named(setting):
    notes = " ".join(load_config(["algorithm=grpo", setting]).notes)
    assert setting.split("=")[0] in notes and IDLE[setting] in notes


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=20", "min_p=0.05", "repetition_penalty=1.1"])
def test_sampling_from_less_than_the_policy_is_said_unless_it_is_corrected(setting):
    args = ["algorithm=grpo", f"actor_rollout_ref.rollout.{setting}"]
    notes = " ".join(load_config(args).notes)
    assert f"sampled with {setting}, but trained as if from the whole policy" in notes
    correction = "algorithm.rollout_correction.rollout_is=token"
    assert "whole policy" not in " ".join(load_config([*args, correction]).notes)
    # the rollout's own log-probs are those before filters, so there is a difference to correct
    load_config([*args, correction, "actor_rollout_ref.actor.old_log_probs=rollout"])
    assert "whole policy" not in " ".join(load_config(["algorithm=grpo"]).notes)


PER_RESPONSE = "actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean"


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_a_loss_of_whole_responses_is_averaged_per_response_unless_the_user_says_otherwise(loss):
    key, mode = PER_RESPONSE
    chosen = ["algorithm=grpo", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    resolved = load_config(chosen)
    assert resolved.value(key) == mode and resolved.sources[key] == f"default (under {loss})"
    assert mode not in " ".join(resolved.notes)
    resolved = load_config([*chosen, f"{key}=token-mean"])
    assert resolved.value(key) == "token-mean" and mode in " ".join(resolved.notes)


def test_other_losses_and_presets_keep_their_own_average():
    key, _ = PER_RESPONSE
    assert load_config(["algorithm=grpo"]).value(key) == "token-mean"
    sapo = "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
    assert load_config(["algorithm=drgrpo", sapo]).value(key) == "seq-mean-token-sum-norm"


def test_kl_cov_holds_back_by_a_tenth_as_its_recipe_does():
    assert load_config(["algorithm=grpo"]).value("actor_rollout_ref.actor.policy_loss.ppo_kl_coef") == 0.1


def test_a_run_has_a_quarter_of_the_settings_that_verl_has():
    """Settings that an algorithm declares are not counted: they come with its file. Nor are free-form dicts."""
    shared = [key for key, leaf in leaves(PPOConfig).items() if not leaf.free_keys and issubclass(leaf.owner, Section)]
    assert 100 < len(shared) < 898 / 4


@pytest.mark.parametrize("key", ["clip_ratio", "clip_ratio_low"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "clip_cov"])
def test_a_lower_clip_above_1_is_refused_where_it_clips_the_ratio(key, loss):
    actor = "actor_rollout_ref.actor"
    chosen = [f"{actor}.policy_loss.loss_mode={loss}", f"{actor}.{key}=1.5"]
    with pytest.raises(ConfigError, match=rf"`{actor}.{key}=1.5` would let the ratio fall to -0.5[\s\S]*at most 1"):
        load_config(chosen)
    free = [f"{actor}.policy_loss.loss_mode=cispo", f"{actor}.clip_ratio_low=1.5"]
    assert load_config(free).value(f"{actor}.clip_ratio_low") == 1.5
    assert load_config([chosen[0], f"{actor}.{key}=1"]).value(f"{actor}.{key}") == 1.0  # never clips
