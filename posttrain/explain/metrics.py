"""Every metric that a run writes: name -> what it is and what to make of it.

`prose/metrics.md` says more on the most useful ones. Algorithms declare their own metrics. A name may stand for
several: `{mean,max,min}` for each of these words, a word in capitals for any text (`timing_s/STAGE`), `K` for a number.
"""

from __future__ import annotations

import re
from functools import cache

FAMILIES: dict[str, str] = {
    "step": "The step that the line of metrics.jsonl belongs to; 0 is the validation before training.",
    "critic/score/{mean,max,min}": (
        "Rewards of the step's responses, as the reward gave them. All equal: nothing can be learnt from them; all "
        "0: see `posttrain reward try FN DATA`."
    ),
    "critic/rewards/mean": "Mean reward after KL in the reward (algorithm.use_kl_in_reward); without it, reward_mean.",
    "critic/advantages/{mean,max,min}": (
        "Advantages over response tokens. The mean is near 0 for estimators that compare a group. All 0: no group "
        "has a signal (groups/no_signal)."
    ),
    "critic/returns/{mean,max,min}": "Returns over response tokens: what the critic learns, if there is one.",
    "critic/values/{mean,max,min}": "The critic's values over response tokens; they should come near critic/returns.",
    "critic/vf_explained_var": (
        "1 - variance(returns - values) / variance(returns): 1 is a perfect critic, 0 one that knows the mean "
        "alone. Below 0 for long: a higher critic.optim.lr, or more trainer.critic_warmup."
    ),
    "critic/vf_loss": "Loss of the critic. It should fall, then follow the rewards.",
    "critic/vf_clipfrac": "Share of tokens whose value was held back by critic.cliprange_value.",
    "critic/vpred_mean": "Mean value that the critic predicts during its update.",
    "critic/{grad_norm,lr}": "Of the critic: the gradient's norm before clipping, and the learning rate.",
    "{actor,critic}/bad_steps": (
        "Updates of this step that were skipped because loss or gradient was not finite. 0 in a healthy run; "
        "trainer.max_bad_steps in a row stop it."
    ),
    "{actor,critic}/optimizer_steps": "Optimizer steps that were made on this step's batch.",
    "critic/warmup": "1 while only the critic learns (trainer.critic_warmup), 0 afterwards.",
    "num_rows/{mean,max,min}": "Rows of a sample, in steps where a conversation with branches ended in several.",
    "num_turns/{mean,max,min}": "Turns of the model in a response, where it may call tools (rollout.multi_turn).",
    "num_turns/limit": (
        "Share of responses that ended because no further turn was allowed (rollout.multi_turn.max_assistant_turns)."
    ),
    "tools/calls": "Calls of tools per response. 0 for long: the model does not know how to call them; SFT first.",
    "tools/errors": "Share of calls that could not be answered; samples say why. High: see `posttrain tool try`.",
    "tools/failing": "Tools that answered no call of this step. 0 in a healthy run; the diagnosis has the error.",
    "tools/seconds": "Seconds that a response waited for its tools, as a mean.",
    "right/mean": "Share of right responses: by the reward's part `acc`, else by a score of at least 0.5.",
    "groups/{all_right,all_wrong}": (
        "Shares of groups whose responses are all right, or all wrong: they give no gradient. Many all right: "
        "harder prompts; many all wrong: easier prompts or a finer reward."
    ),
    "groups/count": "Groups of the step: prompts, each with its responses.",
    "groups/reward_mean/{min,max,std}": "The mean rewards of groups: the lowest, the highest, their deviation.",
    "groups/reward_std/max": "The largest deviation of rewards within one group.",
    "actor/loss": "All that is minimised: policy loss, and the KL and entropy terms where they are on.",
    "actor/{policy_loss,pg_loss}": "As policy_loss.",
    "actor/kl_loss": "As kl_loss.",
    "actor/kl_term": "The KL's part of the loss: kl_loss times actor_rollout_ref.actor.kl_loss_coef.",
    "actor/ratio_deviation": (
        "Largest distance of the probability ratio from 1 before the first update on the batch: 0 but for rounding, "
        "unless responses come from older weights."
    ),
    "actor/router_entropy": (
        "Of a mixture: entropy of the routers' probabilities over all experts, in nats, as a mean over sampled tokens "
        "and layers. The logarithm of the number of experts is the most; near 0 each token knows one expert alone."
    ),
    "actor/route_changes": (
        "Of a mixture: share of (token, layer) choices in which the trainer's router takes other experts than the "
        "recorded ones, before the first update on the batch. 0 but for rounding at equal weights; with "
        "actor_rollout_ref.actor.router_replay.mode=R3 the recorded ones are taken (see `router_replay`)."
    ),
    "actor/router_balance": (
        "Load-balance loss of a mixture (actor_rollout_ref.actor.router_aux_loss_coef): experts times the sum over "
        "them of load x probability, as a mean over layers. 1 is balanced; the number of experts is the most."
    ),
    "{actor,train}/expert_load_max": (
        "Of a mixture: load of a layer's busiest expert in multiples of the mean, as a mean over layers. 1 is "
        "balanced. Growing for long: routers collapse; actor_rollout_ref.actor.router_aux_loss_coef works against it."
    ),
    "actor/lr": "The learning rate of the step's last update.",
    "actor/{reward_kl_penalty,reward_kl_penalty_coeff}": (
        "KL that was taken from the rewards (algorithm.use_kl_in_reward), and its present coefficient."
    ),
    "response_length/{mean,max,min}": "Response tokens: mean, longest, shortest.",
    "response_length/{right,wrong}/mean": (
        "Mean length of right and of wrong responses. Wrong ones that grow alone: length bias of the loss (`drgrpo`)."
    ),
    "response_length/clip_ratio": (
        "Share of responses cut off at data.max_response_length. They rarely hold an answer: raise the limit, or "
        "ask for shorter ones."
    ),
    "prompt_length/{mean,max,min}": "Prompt tokens: mean, longest, shortest.",
    "data_source/SOURCE/reward_mean": "Mean reward of the responses to one data source.",
    "reward/failures": "Responses whose reward failed: raised, hung or gave no number. The samples say why (`error`).",
    "reward/PART/mean": "Mean of one part of the reward, as the reward function named it.",
    "reward_model/{mean,max,min,std}": "Scores of the reward model, of the rows that it could score.",
    "reward_model/failures": "Rows that the reward model could not score.",
    "reward_model/truncated": "Rows that were cut to the reward model's length.",
    "mismatch/logp_mean": (
        "Mean difference between the rollout's and the trainer's log-probs of the sampled tokens. 1e-6 in float32 "
        "is rounding; a jump means that the two no longer compute the same policy."
    ),
    "rollout/age": (
        "Updates between the weights that sampled the tokens and those that learn from them, on average, with "
        "trainer.max_staleness: 0 in the first step. mismatch/* then shows what these updates changed, too."
    ),
    "rollout/age_max": "The same of the oldest token; never more than trainer.max_staleness.",
    "rollout/partial": "Share of the rows whose tokens several policy versions sampled (trainer.partial_rollout).",
    "rollout/overtaken_groups": (
        "Groups that were asked for before others that this step trained, and are left for later steps "
        "(actor_rollout_ref.rollout.oversample). What stays until it is too old is in rollout/dropped_groups."
    ),
    "rollout/unrepeated_groups": "Dropped groups that called a tool with repeatable = False: not asked for again.",
    "rollout/dropped_groups": "Groups too old for trainer.max_staleness; their prompts are asked for again.",
    "rollout/speculation_share": (
        "With actor_rollout_ref.rollout.speculation: share of the sampled tokens that came from passes with drafts, "
        "since the last step (validation included). 0: many responses ran side by side, or drafts were rarely sampled."
    ),
    "rollout/speculation_accepted": (
        "With actor_rollout_ref.rollout.speculation: share of drafted tokens that were sampled. It is high for "
        "repetitive responses and similar groups; below about a half speculation switches itself off."
    ),
    "rollout/speculation_tokens": (
        "With actor_rollout_ref.rollout.speculation: tokens that a response gained in one pass with drafts; 1 without."
    ),
    "mismatch/logp_max": "The largest such difference of one token (see mismatch/logp_mean).",
    "mismatch/kl": "KL of the rollout's policy to the trainer's, by the plain estimate; see mismatch/k3_kl.",
    "mismatch/ppl_ratio": "Perplexity of the trainer over that of the rollout, near 1.",
    "rollout_is/{mean,max}": "Importance weights of the rollout correction; their mean is near 1.",
    "rollout_is/ess": "Effective sample size as a share: 1 is nothing lost, near 0 a batch that hardly counts.",
    "rollout_is/{truncated,masked}": "Shares of tokens whose importance weight was cut at its bound, or left out.",
    "rollout_is/norm": (
        "Mean of the bounded importance weights of a mini-batch, which rollout_is_batch_normalize divides them by."
    ),
    "rollout_rs/{rejected,rejected_rows}": "Shares of tokens, and of responses, that rejection left out.",
    "rollout_rs/RULE": "Share of tokens that one rule of algorithm.rollout_correction.rollout_rs rejects.",
    "prompts/repeated": "Under codapo: 1 in a step on prompts of the step before, 0 in a step on prompts of the data.",
    "filter_groups/{kept,gen_batches,missing,surplus}": (
        "Dynamic sampling: share of generated groups with signal, batches per step, groups that could not be had, "
        "groups kept for the next step (see `dapo`)."
    ),
    "sync/probe_max": (
        "Largest difference of rollout and trainer log-probs on fixed tokens after a weight sync. Above 1e-3 "
        "(float32) or 0.5 (bfloat16) the run stops."
    ),
    "sync/checksum": (
        "Of all weights that the workers that generate were given, where they are others than those that train "
        "(actor_rollout_ref.rollout.n_workers); it is compared on every one of them, and another one stops the run."
    ),
    "timing_s/step": "Seconds of the step by the clock, from the beginning of its first stage. Stages may overlap.",
    "timing_s/save_checkpoint": (
        "Seconds that training stood still for the checkpoint of the step before: for the copy in host memory, and for "
        "an earlier save that was still being written; with trainer.async_save=false for all of the writing."
    ),
    "perf/time_of_background_save": (
        "Seconds from the start of a save to its checkpoint being complete, mostly while training went on "
        "(trainer.async_save); not part of timing_s/step."
    ),
    "timing_s/STAGE": "Seconds of one stage: gen (rollout), reward, ref, update_actor, validation, ...",
    "perf/total_num_tokens": "Tokens of the step's prompts and responses.",
    "perf/time_per_step": "Seconds of the step; of a supervised step without validation.",
    "perf/throughput": "Tokens per second and device over the whole step.",
    "perf/memory_gb": "The most memory that a stage of the step took, in GB; by stage see perf/memory_gb/STAGE.",
    "perf/memory_gb/STAGE": (
        "The most memory while one stage ran, in GB (10^9 bytes): allocated on the CUDA device, or resident in the "
        "process; with several workers, of the fullest."
    ),
    "perf/rollout_memory_gb": "As perf/memory_gb, of workers that only generate (actor_rollout_ref.rollout.n_workers).",
    "perf/rollout_memory_gb/STAGE": "As perf/memory_gb/STAGE, of the workers that only generate.",
    "perf/generated_tokens_per_s": "Response tokens per second of the rollout.",
    "train/{grad_norm,lr}": "Of a supervised step: the gradient's norm before clipping, and the learning rate.",
    "train/bad_steps": "1 if the update was skipped because loss or gradient was not finite.",
    "train/epoch": "Passes over the data that are done.",
    "train/rows": "Rows of the step; of a reward model, pairs.",
    "train/{accuracy,margin}": "As val/accuracy and val/margin, on the step's own pairs.",
    "val/trained_tokens": "Held-out tokens that val/loss is the mean of.",
    "val/score_mean": "Mean score of held-out answers: far from 0 it only drifts; loss.center_coef holds it.",
    "val/SOURCE/mean@K": (
        "Mean score of held-out prompts of one data source, over K responses each; val/SOURCE/PART/mean@K is that "
        "of one part of the reward."
    ),
    "val/SOURCE/std@K": "Deviation of the K scores of a prompt, mean over prompts.",
    "val/SOURCE/pass@K": "Share of prompts with a right one among K responses, the unbiased estimate (see `pass@k`).",
    "val/SOURCE/maj@K": "Score of the answer that most of K responses gave (see `maj@k`).",
}


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile("".join(map(_expression, re.split(r"(\{[^}]*\}|[A-Z]{4,}|K$)", name)))), text)
        for name, text in FAMILIES.items()
    ]


def family_text(metric: str) -> str | None:
    """What a metric is, from the first family that matches; None without one."""
    return next((text for pattern, text in _patterns() if pattern.fullmatch(metric)), None)


def _expression(part: str) -> str:
    if part.startswith("{"):
        return f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
    if part == "K":
        return r"\d+"
    return r".+" if part.isupper() else re.escape(part)
