"""Pages of `posttrain explain` that have no algorithm file of their own: topics and metrics, name -> text."""

TOPICS: dict[str, str] = {
    "drgrpo": """\
DrGRPO ("GRPO done right"): GRPO without its two divisions, and without KL.

    A_i  = r_i - mean(r)                                    no division by std(r)
    loss = mean over responses of (sum of token losses / one constant)       no division by the response's length

GRPO's division by length lengthens wrong answers: a token of a long wrong answer is punished less than a token of a
short one, so answers grow longer, the wrong ones most. Its division by the deviation gives more weight to prompts that
are almost always or almost never solved. DrGRPO takes both out.

Source: Understanding R1-Zero-Like Training: A Critical Perspective, arXiv 2503.20783.

When to use: responses grow longer while the reward does not, above all the wrong ones. It changes the loss, not the
reward: if longer answers really get higher rewards, change the reward.

Settings: algorithm=drgrpo sets all three, and each acts alone:
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm, algorithm.norm_adv_by_std_in_grpo=False,
actor_rollout_ref.actor.use_kl_loss=False. The constant is actor_rollout_ref.actor.loss_scale_factor, or
data.max_response_length where that is null.

Watch: response_length, and the mean length of right and of wrong answers apart.

Signs of failure: a much smaller gradient than before (the constant is larger than most responses): raise the learning
rate or lower the constant.""",
    "dapo": """\
DAPO: GRPO with four changes for long reasoning, and without KL.

    1. clip higher: the upper side of the clip is wider, so that rare tokens can become likelier
    2. dynamic sampling: groups whose responses are all right or all wrong are replaced by further prompts
    3. token-mean: every token weighs the same, in long responses too
    4. overlong shaping: a soft penalty near the length limit (see `overlong_buffer`)

Dynamic sampling draws and answers batches until one is full of groups with signal. Groups beyond it serve the next step
and are saved with the checkpoint; they were sampled by the weights of the step before, whose log-probs are then their
old ones. What max_num_gen_batches leaves open is filled with groups without signal.

Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.

When to use: long reasoning with rewards of right and wrong, above all when groups/no_signal grows or entropy collapses.

Settings: algorithm=dapo sets actor_rollout_ref.actor.clip_ratio_low=0.2, actor_rollout_ref.actor.clip_ratio_high=0.28,
actor_rollout_ref.actor.clip_ratio_c=10, algorithm.filter_groups.enable=True, algorithm.filter_groups.metric=acc,
algorithm.filter_groups.max_num_gen_batches=10, actor_rollout_ref.actor.loss_agg_mode=token-mean,
reward.overlong_buffer.enable=True and actor_rollout_ref.rollout.n=16. Each acts alone.

Watch: filter_groups/kept (share of generated groups with signal), filter_groups/gen_batches (batches per step: the
price), filter_groups/missing (0), actor/entropy, response_length, reward/overlong_reward/mean.

Signs of failure: many batches per step (prompts too easy or too hard: change the data, or the run pays several times);
entropy that rises without end (a lower clip_ratio_high).""",
    "rollout.n": """\
Responses per prompt: the size of the group that GRPO compares.

The mean reward of the group is the baseline of its responses. A larger n makes it steadier (its spread falls with
1 / sqrt(n)) and more often finds both right and wrong answers, without which a group teaches nothing. It costs
computing in proportion: doubling n about doubles the generated tokens and the generation time, and the gains shrink.

    n                                            2      4      5      8     16
    spread of the mean (half are right)      0.354  0.250  0.224  0.177  0.125
    groups with signal, half are right        50 %   88 %   94 %   99 %  100 %
    groups with signal, one in ten is right   18 %   34 %   41 %   57 %   81 %

Rule of thumb: 5 to 8. Take more for hard prompts that are rarely solved or for an unstable run, fewer to save time or
memory. n=1 leaves nothing to compare, so estimators that compare a group refuse it; unset they get 5.

Settings: actor_rollout_ref.rollout.n. A batch then has data.train_batch_size times n responses.

Watch: reward_std, groups/no_signal, timing_s/gen.""",
    "norm_adv_by_std_in_grpo": """\
Whether GRPO divides the advantages of a group by the standard deviation of its rewards.

    True   A_i = (r_i - mean(r)) / (std(r) + 1e-6)     rewards 1,0,0,0,0 give 1.789 and -0.447
    False  A_i =  r_i - mean(r)                        rewards 1,0,0,0,0 give 0.8 and -0.2

It changes how prompts are weighted by difficulty, not the speed of the run. With the division all groups with any
signal pull about equally, so prompts that are almost always or almost never solved count more than their rewards say;
without it prompts that are solved half of the time count most. The gradient is smaller without it (rewards of 0 and 1
have a deviation of at most about 0.5), so the learning rate may need to be higher.

Source: the division is GRPO's (arXiv 2402.03300); taking it out is one of the three settings of `drgrpo`
(arXiv 2503.20783).

Settings: algorithm.norm_adv_by_std_in_grpo.""",
    "lora": """\
LoRA: the base stays frozen; beside chosen linear modules two thin matrices are trained.

    y = W x + (alpha / rank) * B (A x)        A: (rank, in), B: (out, rank); B starts at 0, so nothing changes at first

Only A and B have gradients and optimizer state, so memory falls to little more than the weights. The reference of a KL
term is the base with the adapters off: no second model is loaded. The rollout goes through the same adapters; weight
syncs copy nothing and never write the base. A checkpoint holds the adapters, their optimizer state and the fingerprint
of the base, and is refused beside another base.

Source: LoRA, arXiv 2106.09685; QLoRA (a base of 4 bits), arXiv 2305.14314.

When to use: the optimizer state of all weights does not fit, several tasks share one base, or checkpoints are to be
small. The learning rate is 10 to 100 times that of full training; ranks of 8 to 64 are customary.

Settings: actor_rollout_ref.model.lora_rank, actor_rollout_ref.model.lora_alpha, actor_rollout_ref.model.target_modules,
actor_rollout_ref.model.exclude_modules, actor_rollout_ref.model.lora_adapter_path (start from an adapter),
actor_rollout_ref.model.quantization (4 bits), critic.model.lora_rank, trainer.export_lora. In `posttrain sft` and
`posttrain reward-model` the first six begin with `model.`.

Watch: actor/grad_norm, sync/probe_max (rollout and trainer agree through the adapters), kl_loss.

Signs of failure: a reward that stays flat (learning rate of full training: raise it tenfold); one that falls in the
first steps (halve it).""",
    "pass@k": """\
pass@k: the chance that at least one of k responses to a prompt is right, as a mean over prompts.

    pass@k = 1 - C(n - c, k) / C(n, k)      of n responses to a prompt c are right

This is the mean over all draws of k from the n responses: unbiased, unlike 1 - (1 - c/n)^k. It needs n >= k; more
responses than k make it steadier. pass@1 is the accuracy.

Source: Evaluating Large Language Models Trained on Code, arXiv 2107.03374.

When to use: to see what a model can reach at all. RL mostly turns pass@k into pass@1: once pass@k is no higher than
pass@1, there is little left to learn from these prompts.

Where: val/SOURCE/pass@k in validation (actor_rollout_ref.rollout.val_kwargs.n), and
`posttrain eval MODEL --data FILE --n 8`.""",
    "maj@k": """\
maj@k: the share of prompts that are right when k responses vote.

The most frequent answer counts, of equals the one given first; responses without an answer do not vote. What a response
answered is what its reward read (its part `pred`, `answer` or `extracted`). Validation lets the n responses of a prompt
vote once; `posttrain eval` gives the mean over all draws of k from n in all orders: tied answers share equally.

Source: Self-Consistency Improves Chain of Thought Reasoning in Language Models, arXiv 2203.11171.

When to use: for answers that can be compared as texts (numbers, formulas, labels). For programs every text differs.

Where: val/SOURCE/maj@k in validation (actor_rollout_ref.rollout.val_kwargs.n), and
`posttrain eval MODEL --data FILE --n 8`.""",
    "spin": """\
SPIN (Self-Play Fine-Tuning, arXiv 2401.01335) is not built here; the nearest is `grpo` on the same prompts, which also
learns from the model's own responses but needs a reward that can check them instead of reference answers.""",
}

METRICS: dict[str, str] = {
    "reward_mean": """\
Mean reward of the step's responses. Should rise. Flat from the start: look at groups/no_signal and at the reward
itself (`posttrain reward try`). Falling: lower the learning rate, add KL, take a larger rollout.n.""",
    "reward_std": """\
Standard deviation of the rewards within a group, as a mean over groups. Falls slowly as the policy becomes sure. Near 0
early on means that most groups hold equal rewards and teach nothing: prompts too easy or too hard, or a reward that
always says the same.""",
    "kl_loss": """\
Mean KL estimate between policy and reference (before its coefficient); only present when KL is in the loss. It is 0 at
the first step, where both are the same model; 0.001 to 0.1 is customary later. Far above: the policy has left the
reference, so raise actor_rollout_ref.actor.kl_loss_coef or lower the learning rate. actor/kl_term is the part of the
loss: this times the coefficient.""",
    "policy_loss": """\
The policy loss, as a mean over the step's mini-batches. It says little: with one update per batch the ratio is 1 and
the loss is minus the mean advantage, which is near 0 whatever the policy learns; it wavers, and need not fall. Judge a
run by reward_mean and the validation metrics. Not a number, or suddenly large: look at actor/ppo_kl and
actor/grad_norm.""",
    "response_length": """\
Mean number of response tokens. Steady, or growing together with the reward. Growing while the reward stays: length bias
of the loss (see `drgrpo`), unless the reward itself grows with length. At data.max_response_length: responses are cut
off; raise it.""",
    "groups/no_signal": """\
Share of groups whose rewards are all equal: their advantages are 0 and they teach nothing. High with low rewards:
easier prompts, a larger rollout.n, or a broken reward. High with high rewards: the prompts are learnt; harder ones.""",
    "actor/entropy": """\
Mean entropy of the policy's next-token distribution. Falls as the policy becomes sure. Near 0 early: it has stopped
exploring; raise the temperature, the KL coefficient or actor_rollout_ref.actor.entropy_coeff.""",
    "actor/grad_norm": """\
Norm of the gradient before clipping to actor_rollout_ref.actor.grad_clip. Spikes far above the usual value announce
instability; always far above grad_clip means that the clip sets the step size.""",
    "mismatch/sampling_kl": """\
KL of what responses were sampled from (after top_p, top_k, min_p, repetition_penalty) to the policy that is trained:
how much of it the filters cut off. There where one of them is set; algorithm.rollout_correction.rollout_is corrects
for it.""",
    "mismatch/k3_kl": """\
KL between the rollout's and the trainer's log-probs of the sampled tokens (k3 estimate). 0 but for rounding when both
hold the same weights. Larger: precision or kernels differ, or weights are stale; see `rollout_correction`.""",
}
