"""Each rule speaks when it should, names the settings that help, and is silent otherwise."""

from __future__ import annotations

import io
import math

import pytest

from posttrain.tracking import diagnosis
from posttrain.tracking.diagnosis import RULES, RunFacts, StepFacts, diagnose
from posttrain.tracking.progress import Progress
from posttrain.tracking.step_line import FEW, describe_failures, failing_tools, most_common_error

HEALTHY = {
    "reward_mean": 0.5,
    "reward_std": 0.4,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "groups/no_signal": 0.2,
    "groups/all_right": 0.1,
    "groups/all_wrong": 0.1,
    "kl_loss": 0.01,
    "actor/pg_clipfrac": 0.01,
    "actor/grad_norm": 1.0,
    "response_length": 100.0,
    "response_length/clip_ratio": 0.0,
    "perf/throughput": 12345.6,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 3.0,
    "timing_s/step": 10.0,
}


def known(now: dict | None = None, past: list[dict] | None = None, **facts) -> StepFacts:
    return StepFacts(HEALTHY | (now or {}), [HEALTHY | one for one in past or []], RunFacts(**facts))


def over(name: str, values: list[float], **more) -> StepFacts:
    """A run in which `name` took these values, the last one now."""
    steps = [{name: value} for value in values]
    for key, series in more.items():
        for one, value in zip(steps, series, strict=True):
            one[key.replace("__", "/")] = value
    return known(steps[-1], steps[:-1])


def ramp(start: float, end: float, steps: int = 10) -> list[float]:
    return [start + (end - start) * i / (steps - 1) for i in range(steps)]


def test_healthy_run_gets_no_advice():
    for count in (0, 1, 20):
        assert [rule.__name__ for rule in RULES if rule(known(past=[{}] * count, kl_on=True))] == []


def test_line_says_reward_signal_kl_clipping_length_speed_and_stages():
    line, advice = diagnose(HEALTHY, [], RunFacts(kl_on=True), step=3, width=104)
    assert advice == []
    assert line == (
        "step 3: reward 0.500, 20% no signal, KL 0.01, clip 1.0%, length 100, 12,346 tok/s, 10.0 s, rollout-bound 60%"
    )
    assert diagnosis.stage_shares(HEALTHY) == "rollout 60%, update 30%"
    assert diagnose(HEALTHY)[0] == "reward 0.500, 20% no signal, length 100, 12,346 tok/s, 10.0 s, rollout-bound 60%"


def test_line_fits_one_row_of_100_columns_and_drops_the_least_important_first():
    past = [HEALTHY | {"reward_mean": value, "response_length": 1000 + 900 * value} for value in ramp(-0.9, 0.9)]
    now = past[-1] | {"perf/throughput": 1234567.0, "timing_s/step": 12345.6, "kl_loss": 1.2e-05}
    line, _ = diagnose(now, past[:-1], RunFacts(kl_on=True))
    assert len(f"step 10000/10000: {line}") <= 100
    assert line.startswith("reward 0.900 (+1.000), 20% no signal, KL 1.2e-05") and line.endswith("12345.6 s")


def test_line_names_the_trend_only_when_it_is_more_than_scatter():
    rising = [HEALTHY | {"reward_mean": value} for value in ramp(0.1, 0.5)]
    assert "reward 0.500 (+0.222)" in diagnose(rising[-1], rising[:-1])[0]
    wavering = [HEALTHY | {"reward_mean": 0.5 + 0.1 * (-1) ** i} for i in range(10)]
    assert "reward 0.400, " in diagnose(wavering[-1], wavering[:-1])[0]
    shorter = [HEALTHY | {"response_length": value} for value in ramp(3.4, 3.0)]
    assert "length 3, " in diagnose(shorter[-1], shorter[:-1])[0]  # not (-0)
    assert "KL" not in diagnose(HEALTHY, [], RunFacts(kl_on=False))[0]
    assert diagnose({}, []) == ("", [])


def test_all_rewards_zero_points_to_the_truth():
    zero = {"critic/score/max": 0.0, "critic/score/min": 0.0, "reward_mean": 0.0}
    advice = diagnosis.rewards_all_zero(known(zero, [zero, zero]))
    assert advice and "ground truth" in advice and "posttrain reward try FN DATA" in advice
    assert "chat template" in advice  # a model that is asked in another's form answers nothing right either
    assert diagnosis.rewards_all_zero(known(zero, [{}])) is None  # the step before had a reward
    assert diagnosis.rewards_all_zero(known({"critic/score/min": -1.0, "critic/score/max": 0.0})) is None


@pytest.mark.parametrize(
    ("right", "wrong", "said"), [(0.8, 0.1, "harder"), (0.1, 0.8, "easier"), (0.0, 0.0, "finer reward")]
)
def test_groups_without_signal_are_named_with_their_cause(right, wrong, said):
    now = {"groups/no_signal": 0.9, "groups/all_right": right, "groups/all_wrong": wrong}
    advice = diagnosis.groups_without_signal(known(now, n=5))
    assert (
        advice
        and advice.startswith("90% of the groups have equal rewards")
        and said in advice
        and "rollout.n=5" in advice
    )
    assert diagnosis.groups_without_signal(known(now, grouped=False)) is None


def test_groups_without_signal_is_told_late_where_prompts_are_learnt_and_names_a_low_temperature():
    learning = {"groups/no_signal": 0.75, "groups/all_right": 0.6, "groups/all_wrong": 0.1}
    assert diagnosis.groups_without_signal(known(learning)) is None
    assert diagnosis.groups_without_signal(known(learning | {"groups/all_wrong": 0.65})) is not None
    cold = diagnosis.groups_without_signal(known({"groups/no_signal": 0.95}, temperature=0.05))
    assert cold and "rollout.temperature (0.05 now)" in cold
    zero = {"critic/score/max": 0.0, "critic/score/min": 0.0, "groups/no_signal": 1.0}
    assert diagnosis.groups_without_signal(known(zero, [zero])) is None  # rewards_all_zero says it


def names_remedies_in_order(advice: str | None) -> bool:
    assert advice is not None
    places = [advice.index(word) for word in ("optim.lr", "KL", "rollout.n", "clip_ratio")]
    return places == sorted(places)


def test_falling_reward_names_rate_kl_n_and_clip_last():
    falling = over("reward_mean", ramp(0.6, 0.2))
    advice = diagnosis.reward_falls(falling)
    assert advice and "fell by 0.222" in advice and names_remedies_in_order(advice)
    assert "use_kl_loss=true" in advice
    assert diagnosis.reward_falls(over("reward_mean", ramp(0.6, 0.2, 5))) is None  # too short a history
    assert diagnosis.reward_falls(over("reward_mean", ramp(0.2, 0.6))) is None


def test_a_reward_that_fell_at_once_is_compared_with_the_start_and_scatter_is_no_fall():
    broken = over("reward_mean", [0.46, 0.1, 0.04, 0.0, 0.0, 0.0])
    assert "fell from 0.2 in the first steps to 0" in (diagnosis.reward_falls(broken) or "")
    long_ago = over("reward_mean", [0.5, 0.52, 0.48, 0.3, 0.2, *[0.2, 0.21] * 8])
    assert "fell from 0.5" in (diagnosis.reward_falls(long_ago) or "")
    # A recorded run of 60 prompts a step that was learning: neighbouring steps differ by 0.05.
    wavering = [0.46, 0.5, 0.58, 0.55, 0.5, 0.57, 0.44, 0.45, 0.5, 0.49, 0.47]
    assert all(diagnosis.reward_falls(over("reward_mean", wavering[:end])) is None for end in range(1, 12))
    none = over("reward_mean", [0.003, *[0.0] * 7], reward_std=[0.007, *[0.0] * 7])
    assert diagnosis.reward_falls(none) is None  # of rewards up to 1 that is nothing


def test_a_change_counts_above_three_deviations_of_what_neighbours_differ_by():
    risen = [0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.7, 0.6, 0.7, 0.6]  # by 0.1, which is 1.5 of them
    assert over("reward_mean", risen).is_noise("reward_mean")
    assert not over("reward_mean", risen[:5] + [value + 0.15 for value in risen[5:]]).is_noise("reward_mean")


def test_too_high_a_rate_is_named_with_its_value():
    now = {"actor/pg_clipfrac": 0.5}
    advice = diagnosis.update_unstable(known(now, lr=1e-5, clip_ratio=0.2, kl_on=True, kl_coef=0.001))
    assert names_remedies_in_order(advice) and advice is not None
    assert advice.startswith("50% of the tokens are clipped") and "1e-05 now; try 2e-06" in advice
    assert "kl_loss_coef=0.001" in advice and "clip_ratio=0.2" in advice


def test_gradient_jump_and_skipped_update_are_instability():
    assert names_remedies_in_order(diagnosis.update_unstable(over("actor/grad_norm", [1.0] * 10 + [30.0])))
    assert diagnosis.update_unstable(over("actor/grad_norm", [1.0] * 10 + [5.0])) is None
    assert names_remedies_in_order(diagnosis.update_unstable(known({"actor/bad_steps": 1.0})))
    assert "by 0.28 per token" in (diagnosis.update_unstable(known({"actor/ppo_kl": 0.28})) or "")
    assert diagnosis.update_unstable(known({"actor/ppo_kl": 0.13})) is None


def test_kl_range_counts_after_the_first_steps_and_with_kl_on():
    small = {"kl_loss": 0.0}
    assert diagnosis.kl_out_of_range(known(small, [small] * 4, kl_on=True)) is None
    late = diagnosis.kl_out_of_range(known(small, [small] * 5, kl_on=True))
    assert late and "below 0.001" in late and "optim.lr" in late
    large = diagnosis.kl_out_of_range(known({"kl_loss": 0.2}, kl_on=True))
    assert large and "above 0.1" in large
    assert diagnosis.kl_out_of_range(known({"kl_loss": 0.2}, kl_on=False)) is None
    assert diagnosis.kl_out_of_range(known({"kl_loss": math.nan}, kl_on=True)) is None


def test_drift_of_length_without_reward_names_the_loss():
    advice = diagnosis.length_drifts(over("response_length", ramp(100, 200)))
    assert advice and "seq-mean-token-sum-norm (now token-mean)" in advice and "grew by 45%" in advice
    already = over("response_length", ramp(100, 200))
    already.run.loss_agg_mode = "seq-mean-token-sum-norm"
    assert "max_response_length" in (diagnosis.length_drifts(already) or "")


def test_reward_that_grows_with_length_is_told_apart():
    both = over("response_length", ramp(100, 200), reward_mean=ramp(0.2, 0.6))
    advice = diagnosis.length_drifts(both)
    assert advice and "the reward with them" in advice and "seq-mean-token-sum-norm" not in advice
    wrong_are_longer = over("response_length", ramp(100, 200), reward_mean=ramp(0.2, 0.6))
    wrong_are_longer.now = {**wrong_are_longer.now, "response_length/right/mean": 90, "response_length/wrong/mean": 300}
    said = diagnosis.length_drifts(wrong_are_longer) or ""
    assert "seq-mean-token-sum-norm" in said and "without more reward" not in said, "the reward rose"
    assert "wrong ones are the longest (300 tokens, right ones 90)" in said


def test_shrinking_and_steady_lengths():
    assert "shrank by 31%" in (diagnosis.length_drifts(over("response_length", ramp(200, 100))) or "")
    assert diagnosis.length_drifts(over("response_length", ramp(100, 110))) is None


def test_cut_off_responses_and_failing_rewards_are_named():
    assert "40% of the responses are cut off" in (
        diagnosis.responses_cut_off(known({"response_length/clip_ratio": 0.4})) or ""
    )
    assert diagnosis.responses_cut_off(known({"response_length/clip_ratio": 0.4, "right/mean": 0.1})) is not None
    assert diagnosis.responses_cut_off(known({"response_length/clip_ratio": 0.4, "right/mean": 0.9})) is None
    assert "failed on 3 responses" in (diagnosis.reward_failures(known({"reward/failures": 3.0})) or "")
    assert diagnosis.reward_failures(known({"reward/failures": 0.0})) is None


def test_no_rule_is_built_on_policy_loss():
    steps = [HEALTHY | {"policy_loss": value} for value in ramp(-5, 50)]
    assert diagnose(steps[-1], steps[:-1])[1] == []


def test_a_policy_that_is_sure_and_wrong_has_collapsed_and_one_that_is_right_has_learnt():
    falls = [1.0, 1.0, 1.0, 0.5, 0.1, 0.05, 0.05]
    wrong = over("actor/entropy", falls, right__mean=[0.3] * 7)
    said = diagnosis.entropy_collapses(wrong) or ""
    assert "entropy fell from 1 to 0.067, and 30% of the responses are right" in said and "entropy_coeff" in said
    assert diagnosis.entropy_collapses(over("actor/entropy", falls, right__mean=[0.3] * 4 + [0.9] * 3)) is None
    assert diagnosis.entropy_collapses(over("actor/entropy", [1.0] * 4 + [0.5] * 3, right__mean=[0.3] * 7)) is None
    # From 30 % to 70 %: more than half of what was wrong is learnt.
    assert diagnosis.entropy_collapses(over("actor/entropy", falls, right__mean=[0.3] * 4 + [0.7] * 3)) is None


def test_entropy_that_grows_without_more_reward_names_the_bonus():
    grown = [0.4, 0.4, 0.4, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    said = diagnosis.entropy_grows(over("actor/entropy", grown))
    assert said and "from 0.4 to 4" in said and "entropy_coeff" in said
    assert diagnosis.entropy_grows(over("actor/entropy", grown, reward_mean=ramp(0.3, 0.9, 9))) is None
    assert diagnosis.entropy_grows(over("actor/entropy", [0.4] * 5 + [0.8] * 4)) is None


def test_log_probs_that_drift_apart_are_named_and_the_rounding_of_bfloat16_is_not():
    assert "mismatch/logp_mean" in (diagnosis.mismatch_rises(over("mismatch/logp_mean", [1e-6, 0.05, 0.2])) or "")
    assert diagnosis.mismatch_rises(over("mismatch/logp_mean", [0.008] * 8)) is None
    for steps in (1, 2, 8):  # as it was from the start
        assert diagnosis.mismatch_rises(over("mismatch/logp_mean", [0.02] * steps)) is None
    older = over("mismatch/logp_mean", [1e-6, 0.05, 0.2], rollout__age=[0.0, 1.0, 1.0])
    assert diagnosis.mismatch_rises(older) is None  # an update lies between, as was asked for


def test_a_reward_that_rises_while_fewer_answers_are_right_names_the_part_that_pays():
    hacked = over("reward_mean", ramp(0.3, 1.0), right__mean=ramp(0.4, 0.1), reward__nine__mean=ramp(0.0, 0.9))
    assert "Most of it is reward/nine/mean (+0.7)" in (diagnosis.parts_diverge(hacked) or "")
    assert diagnosis.parts_diverge(over("reward_mean", ramp(0.3, 1.0), right__mean=ramp(0.4, 0.9))) is None
    # Long after: both stand still, and the run is as wrong as before.
    still = over("reward_mean", ramp(0.3, 1.0) + [1.0] * 20, right__mean=ramp(0.4, 0.1) + [0.1] * 20)
    assert "share of right responses fell by 0.23" in (diagnosis.parts_diverge(still) or "")


def test_responses_that_never_end_from_the_first_step_on_point_to_the_template():
    lost = over("response_length/clip_ratio", [0.95] * 4, right__mean=[0.0] * 4)
    assert "chat template" in (diagnosis.responses_run_on(lost) or "")
    assert diagnosis.responses_cut_off(lost) is None  # one finding, not two
    later = over("response_length/clip_ratio", [0.1, 0.1, 0.1, 0.9], right__mean=[0.3] * 4)
    assert diagnosis.responses_run_on(later) is None and diagnosis.responses_cut_off(later) is not None


def test_first_responses_without_a_word_point_to_the_template():
    empty = over("response_length", [1.07, 1.6, 3.3], right__mean=[0.0, 0.0, 0.0])
    assert "had 1.1 tokens, and 0% were right: the chat template" in (diagnosis.responses_empty(empty) or "")
    assert diagnosis.responses_empty(over("response_length", [1.07, 1.1], right__mean=[0.5, 0.5])) is None
    assert diagnosis.responses_empty(over("response_length", [30.0, 1.1], right__mean=[0.0, 0.0])) is None


ERRORS = [
    None,
    "returned None instead of a number",
    "ValueError: cannot read 13\n  /home/me/rewards/mine.py, line 3, in compute_score: raise ValueError(text)",
    "ValueError: cannot read 43\n  /home/me/rewards/mine.py, line 3, in compute_score: raise ValueError(text)",
    "ValueError: other\n  /home/me/rewards/mine.py, line 9, in compute_score: int(text)",
]


def test_a_reward_that_fails_now_and_then_is_told_of_with_its_commonest_error_and_where_the_others_are():
    assert most_common_error([]) == most_common_error([None]) == ""
    assert most_common_error(ERRORS) == "ValueError: cannot read 13 (mine.py, line 3)"
    assert most_common_error(ERRORS[1:2]) == "returned None instead of a number"
    now = HEALTHY | {"reward/failures": 4.0}
    for freq, kept in ((1, "column `error`"), (10, "every 10 steps"), (0, "tracking.samples_freq=1 keeps")):
        _, (said,) = diagnose(now, [], RunFacts(samples_freq=freq), reward_error=most_common_error(ERRORS))
        assert said.startswith("The reward failed on 4 responses, most often: ValueError: cannot read 13 (mine.py")
        assert kept in said


def test_a_tool_fails_when_no_call_is_answered_and_calls_that_are_asked_wrongly_count_when_they_are_several():
    def calls(name, *errors):
        return [{"name": name, "error": error} for error in errors]

    assert failing_tools([]) == failing_tools([[]]) == {}
    assert failing_tools([calls("search", "raised: KeyError: a"), calls("search", None)]) == {}
    assert failing_tools([calls("search", "timeout: late")]) == {"search": ["timeout: late"]}
    wrong = "arguments: b must be a number"
    assert failing_tools([calls("add", wrong)] * (FEW - 1)) == {}
    assert failing_tools([calls("add", wrong)] * FEW) == {"add": [wrong] * FEW}
    nobodys = [*calls("sarch", *["unknown: There is no tool"] * FEW), *calls(None, *["unreadable"] * FEW)]
    assert failing_tools([nobodys]) == {}, "names that a model makes up are no tools"
    errors = ["raised: KeyError: a", "raised: ValueError: b", "raised: ValueError: c", "timeout: late"]
    failing = failing_tools([calls("search", *errors), calls("add", "open: no.")])
    assert describe_failures(failing) == (
        "the only call of the tool add failed, most often: open: no; "
        "all 4 calls of the tool search failed, most often: raised: ValueError: b"
    )
    now = HEALTHY | {"tools/failing": 2.0}
    _, (told,) = diagnose(now, [], RunFacts(), tool_error=describe_failures(failing))
    assert told.startswith("The only call of the tool add failed") and "`posttrain tool try`" in told
    assert diagnose(HEALTHY | {"tools/failing": 0.0}, [], RunFacts())[1] == []


def test_the_same_advice_with_another_error_is_no_news():
    progress = Progress(100, stream=io.StringIO())
    assert progress._is_news("The reward failed on 4 responses, most often: ValueError: a")
    assert not progress._is_news("The reward failed on 12 responses, most often: TypeError: b")
    assert progress._is_news("All rewards are 0.")
