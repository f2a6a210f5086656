"""Words of the field, and of the lines that a run prints, as pages of `posttrain explain`: name -> text.

A page says what the word means, what to make of it, where it is set and which page says more. Keys that it names are
followed by their own sentences.
"""

from __future__ import annotations

WORDS: dict[str, str] = {
    "advantage": """\
How much better a response (or a token) did than was to be expected. The update makes tokens with a positive
advantage likelier and those with a negative one less likely; with 0 nothing is learnt. GRPO expects the mean
reward of the group, PPO what its critic predicts.

Settings: algorithm.adv_estimator. Metrics: critic/advantages/mean.
More: docs/algorithms.md; `posttrain explain grpo`, `posttrain explain gae`.""",
    "policy": """\
The model that is trained, seen as what it does: given the tokens so far, a probability for each next token.
Settings call it the actor. The old policy is the one that sampled the responses, the reference the one that
training began with.

Settings: actor_rollout_ref.model.path. More: docs/algorithms.md; `posttrain explain reference`.""",
    "actor": """\
The model that is trained: the policy. The critic, the reference and the reward model are others beside it.

`posttrain explain actor_rollout_ref.actor` lists its settings. More: docs/ppo.md.""",
    "critic": """\
A second model that predicts, at every token, the reward that the response will get. Only PPO
(algorithm.adv_estimator=gae) trains one: advantages are rewards beyond its prediction. GRPO needs none.

`posttrain explain critic.model` and `posttrain explain critic.optim` list its settings. Metrics:
critic/vf_explained_var. More: docs/ppo.md; `posttrain explain gae`.""",
    "value": """\
What the critic predicts at a token: the reward that is still to come. See `posttrain explain critic`.""",
    "baseline": """\
What a reward is compared with, so that an advantage is left: the group's mean (GRPO), the critic's value (PPO), a
greedy response (`remax`). It makes the gradient steadier and does not change its direction on average.

Settings: algorithm.adv_estimator. More: docs/algorithms.md.""",
    "return": """\
The reward that is still to come after a token, discounted by algorithm.gamma. The critic learns to predict it.

Settings: algorithm.gamma, algorithm.lam. More: `posttrain explain gae`.""",
    "kl": """\
KL divergence: how far the policy has moved away from the reference, 0 where both are the same. A KL term holds the
policy near the model that training began with, so that it does not forget its language while it chases the reward.
The `KL` of the step line is kl_loss: 0.001 to 0.1 is customary. (As a value of kl_loss_type, `kl` is the estimate
`k1`.)

Settings: actor_rollout_ref.actor.use_kl_loss, actor_rollout_ref.actor.kl_loss_coef,
actor_rollout_ref.actor.kl_loss_type; in the reward instead of the loss: algorithm.use_kl_in_reward.
More: docs/algorithms.md; `posttrain explain kl_loss_type`.""",
    "entropy": """\
How undecided the policy is about its next token: 0 if it is sure, high if many tokens are about as likely. It
falls as training goes on. Near 0 early: the policy has stopped exploring, and groups have no signal.

Settings: actor_rollout_ref.actor.entropy_coeff, actor_rollout_ref.rollout.temperature. Metrics: actor/entropy.
More: docs/diagnosis.md.""",
    "clip": """\
The limit of an update: a token whose probability has already moved beyond the clip range in the direction that its
advantage wants has no gradient. The `clip 1.6%` of the step line is the share of such tokens (actor/pg_clipfrac):
0 with one update per batch, up to about 20 % with several. (Another clip, of the gradient's norm, is
actor_rollout_ref.actor.grad_clip.)

Settings: actor_rollout_ref.actor.clip_ratio, actor_rollout_ref.actor.clip_ratio_low,
actor_rollout_ref.actor.clip_ratio_high. More: `posttrain explain vanilla`.""",
    "ratio": """\
How much likelier a token is under the policy now than when it was sampled: 1 before the first update on a batch.
The loss clips it to stay near 1. See `posttrain explain clip`.

Metrics: actor/ratio_deviation, actor/ppo_kl.""",
    "reference": """\
The model that training began with, kept unchanged. A KL term compares the policy with it. It is loaded only where
a KL term is on; with LoRA it is the base with the adapters switched off. The `reference` stage of a step computes
its log-probs.

Settings: actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward,
actor_rollout_ref.ref.fsdp_config.param_offload. More: `posttrain explain kl`.""",
    "checkpoint": """\
All that a run needs to go on: weights, optimizer, place in the data, random numbers. Checkpoints lie in the run
directory as checkpoints/global_step_N; the same command continues from the last one. `saved` in the console is one
that was written, `best checkpoint` the one with the best validation. `posttrain export` writes one as a Hugging
Face folder.

Settings: trainer.save_freq, trainer.max_ckpt_to_keep, trainer.resume_mode, trainer.resume_from_path.
More: docs/runs.md.""",
    "batch size": """\
data.train_batch_size is prompts per step. Each is answered rollout.n times, so that a step has that many times
more responses. They are cut into mini-batches of ppo_mini_batch_size prompts, with one optimizer step for each;
micro-batches only limit what is computed at once and change no result. `posttrain doctor` says your numbers in
words.

Settings: data.train_batch_size, actor_rollout_ref.rollout.n, actor_rollout_ref.actor.ppo_mini_batch_size,
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu. More: docs/tuning.md.""",
    "mini-batch": """\
The part of a batch that one optimizer step learns from, counted in prompts (each with all its responses). Fewer
and larger ones are steadier: with one mini-batch per batch the update is on-policy.

Settings: actor_rollout_ref.actor.ppo_mini_batch_size. More: `posttrain explain batch size`.""",
    "micro-batch": """\
The part of a mini-batch that is computed at once. It decides memory and speed, and changes no result: gradients
are summed over micro-batches. Lower it if a run does not fit into memory.

Settings: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.actor.ppo_max_token_len_per_gpu.
More: docs/plan.md; `posttrain plan` predicts the memory.""",
    "rollout": """\
Generating responses to the step's prompts with the present policy, and the part of the program that does it. In
the live row `rollout 12/64 responses` counts those that are whole; `rollout-bound` says that it takes most of a
step.

Settings: actor_rollout_ref.rollout.name (the engine), actor_rollout_ref.rollout.n,
actor_rollout_ref.rollout.temperature, data.max_response_length; `posttrain explain actor_rollout_ref.rollout`
lists all.
More: docs/rollout.md.""",
    "greedy rollout": """\
One more response to each prompt, with the likeliest token at each place: `remax` compares sampled responses with
it.

Settings: algorithm.adv_estimator. More: `posttrain explain remax`.""",
    "greedy": """\
Taking the likeliest token each time instead of sampling. Validation does so by default; training must sample, or
the responses to a prompt are all the same.

Settings: actor_rollout_ref.rollout.val_kwargs.do_sample, actor_rollout_ref.rollout.temperature.""",
    "sampling": """\
Drawing each token at random by its probability. Without it the responses to a prompt would be equal and a group
would teach nothing.

Settings: actor_rollout_ref.rollout.temperature, actor_rollout_ref.rollout.top_p, actor_rollout_ref.rollout.top_k.
More: docs/rollout.md.""",
    "temperature": """\
How freely tokens are sampled: 1 takes the model's own probabilities, less prefers the likely ones, 0 always takes
the likeliest. Train with 0.7 to 1: with 0.1 responses to a prompt are nearly alike, and groups have no signal.
Validation has its own.

Settings: actor_rollout_ref.rollout.temperature, actor_rollout_ref.rollout.val_kwargs.temperature.
More: docs/rollout.md.""",
    "reward": """\
The number that says how good a response is. The run learns to raise its mean: `reward` in the live row and the
step line is reward_mean, and `(+0.044)` its change over the last steps. It comes from a Python function of yours,
a built-in scorer chosen by the row's data_source, or a reward model.

Settings: custom_reward_function.path, custom_reward_function.name, reward.functions, reward_model.enable;
`posttrain explain reward.num_workers` and its like are about the processes that compute it.
More: docs/own_reward.md, docs/rewards.md; `posttrain reward try FN DATA` tries one.""",
    "rewards": """\
The stage of a step that waits for scores which are not there yet when the last response is. Most of them are
computed while others are still generated. `scores` in the live row counts them; `rewards-bound`: a slow reward.

Settings: reward.num_workers, reward.timeout_s. More: docs/rewards.md; `posttrain explain reward`.""",
    "reward model": """\
A model that scores responses, trained on pairs of a better and a worse one (`posttrain reward-model`). As a stage
of a step: it scores the responses.

Settings: reward_model.enable, reward_model.model.path. More: docs/reward_models.md; `posttrain explain
reward-model`.""",
    "reward hacking": """\
Learning to earn the reward without doing the task: listing all answers where one is looked for, writing at length
where length pays. The reward rises and the responses get worse. Read them (`posttrain samples RUN`), and let the
reward compare one answer; a KL term slows it down.

Settings: actor_rollout_ref.actor.use_kl_loss, custom_reward_function.path.
More: docs/reward_try.md; `posttrain doctor` looks for two such loopholes.""",
    "ground truth": """\
The reference answer of a row: the reward gets it as ground_truth beside the response. It is the column
ground_truth (of the row, or inside its column reward_model as verl has it), or else response.

More: docs/own_data.md.""",
    "epoch": """\
One pass over the training prompts. (actor_rollout_ref.actor.ppo_epochs is something else: passes over the
responses of one step.)

Settings: trainer.total_epochs, trainer.total_training_steps, actor_rollout_ref.actor.ppo_epochs.""",
    "step": """\
One round of a run: prompts are answered, scored, and learnt from. `step 4/20` in the console is the fourth of
twenty. A step makes one optimizer step for each mini-batch. In metrics.jsonl, step 0 is the validation before
training.

Settings: trainer.total_training_steps, trainer.total_epochs, data.train_batch_size. More: docs/runs.md.""",
    "group": """\
The responses to one prompt. GRPO and its relatives compare each with the others of its group; a group whose
rewards are all equal teaches nothing (`no signal`).

Settings: actor_rollout_ref.rollout.n. Metrics: groups/no_signal, groups/all_right, groups/all_wrong.
More: `posttrain explain rollout.n`.""",
    "no signal": """\
`38% no signal` in the step line: in that share of the groups all rewards are equal, so that their advantages are 0
and they teach nothing. High with low rewards: easier prompts, a larger rollout.n, or a broken reward. High with
high rewards: the prompts are learnt; take harder ones. Normal at the end of a run that has learnt its task.

Settings: actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature, algorithm.filter_groups.enable
(replaces such groups). Metrics: groups/no_signal. More: docs/diagnosis.md.""",
    "loss": """\
The number that an optimizer step lowers. In RL it says little: the policy loss stays near 0 and need not fall;
judge a run by its reward. In `posttrain sft` and `posttrain reward-model` it should fall, and val/loss with it.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode, actor_rollout_ref.actor.loss_agg_mode.
Metrics: policy_loss, actor/loss, train/loss, val/loss. More: docs/algorithms.md.""",
    "gradient norm": """\
The length of the gradient: how strongly a batch pulls at the weights (`grad norm` in the console). Longer ones are
scaled down to grad_clip. Sudden values far above the usual announce instability: lower the learning rate.

Settings: actor_rollout_ref.actor.grad_clip. Metrics: actor/grad_norm, train/grad_norm. More: docs/diagnosis.md.""",
    "gradient": """\
The direction in which the weights are changed to lower the loss. See `posttrain explain gradient norm` and
`posttrain explain advantage`.""",
    "learning rate": """\
How far one optimizer step moves the weights (`lr`). Too high: the reward collapses and the KL grows; too low:
nothing changes. 1e-6 is usual for RL of all weights of models with billions of parameters, 10 to 100 times that
with LoRA.

Settings: actor_rollout_ref.actor.optim.lr, actor_rollout_ref.actor.optim.lr_warmup_steps,
actor_rollout_ref.actor.optim.lr_scheduler_type; `optim.lr` of `posttrain sft` and `posttrain reward-model`.
Metrics: actor/lr. More: docs/tuning.md.""",
    "warm-up": """\
Steps at the start in which the learning rate rises from 0 to its value; a critic may have steps of its own before
the policy is updated.

Settings: actor_rollout_ref.actor.optim.lr_warmup_steps, actor_rollout_ref.actor.optim.lr_warmup_steps_ratio,
trainer.critic_warmup.""",
    "optimizer": """\
What changes the weights by their gradients: AdamW, which keeps two more numbers for each weight. An optimizer step
is one such change; a training step makes one for each mini-batch.

Settings: actor_rollout_ref.actor.optim.lr, actor_rollout_ref.actor.optim.weight_decay,
actor_rollout_ref.actor.fsdp_config.optimizer_offload.""",
    "update": """\
The stage of a step in which the policy learns: forward and backward passes over its responses, and optimizer
steps. In the live row `rows` are the responses that it has gone over, once for each pass. `update-bound`: it takes
most of the step.

Settings: actor_rollout_ref.actor.ppo_mini_batch_size, actor_rollout_ref.actor.ppo_epochs,
actor_rollout_ref.actor.ppo_max_token_len_per_gpu. Metrics: timing_s/update_actor. More: docs/tuning.md.""",
    "critic update": """\
The stage of a step in which the critic learns to predict rewards.

Settings: critic.optim.lr, critic.ppo_mini_batch_size. Metrics: critic/vf_loss, timing_s/update_critic.
More: `posttrain explain critic`.""",
    "bound": """\
`update-bound 53%` in the step line: more than half of the step's time went into that stage, here 53 % into the
update. To make a run quicker, begin there: `rollout-bound` is generation (shorter responses, another engine, more
GPUs), `update-bound` training (larger passes), `rewards-bound` a slow reward, `validation-bound` validation too
often.

Settings: trainer.test_freq, reward.num_workers, actor_rollout_ref.actor.ppo_max_token_len_per_gpu.
Metrics: timing_s/STAGE. More: docs/tuning.md.""",
    "tok/s": """\
Tokens per second. In the step line: prompts and responses of the step over its whole time, per device
(perf/throughput). In the live row: of the stage that runs, such as the tokens that the rollout generates. Compare
it between runs of the same model and lengths only.

Metrics: perf/throughput, perf/generated_tokens_per_s. More: docs/tuning.md.""",
    "token": """\
A piece of text, about four letters of English: what a model reads and writes one at a time. Limits of length count
tokens. `3,210 tokens` in the live row are those of the stage so far; `512 of 900 tokens` of an SFT step are those
with a loss.

Settings: data.max_prompt_length, data.max_response_length.""",
    "length": """\
Mean tokens of a response (response_length), and `(+12)` its change over the last steps. At
data.max_response_length responses are cut off before their answer.

Settings: data.max_response_length. Metrics: response_length, response_length/clip_ratio. More: docs/diagnosis.md.""",
    "response": """\
What the model writes to a prompt. A step has data.train_batch_size prompts with rollout.n responses each.

Settings: actor_rollout_ref.rollout.n, data.max_response_length. More: `posttrain samples RUN` shows them.""",
    "prompt": """\
What the model is asked: a text or a list of messages in the column `prompt`, put through the chat template.

Settings: data.prompt_key, data.max_prompt_length, data.system_prompt. More: docs/own_data.md.""",
    "chat template": """\
How messages become one text: the marks for who speaks, and the opening of the model's own turn. It comes with the
tokenizer. Base models may have none; prompts are then used as they are.

Settings: data.apply_chat_template_kwargs, data.system_prompt, actor_rollout_ref.model.tokenizer_path.
More: docs/data.md; `posttrain doctor` looks at it.""",
    "tokenizer": """\
What cuts text into tokens, and puts them together again. It belongs to its model: another one's gives other
numbers for the same text.

Settings: actor_rollout_ref.model.tokenizer_path. More: `posttrain explain chat template`.""",
    "left": """\
In the live row: the time until the present stage ends (`0:35 left`) and until the run does (`run 1:10 left`), by
the speed so far.""",
    "run": """\
One training from its command to its end, with a directory of its own: outputs/PROJECT/NAME. `run 1:10 left` in the
live row is the time until it ends.

Settings: trainer.project_name, trainer.experiment_name, trainer.default_local_dir. More: docs/runs.md.""",
    "scores": """\
Rewards of single responses, counted in the live row as they come. See `posttrain explain rewards`.""",
    "rows": """\
In the live row: the responses (in `posttrain sft` and `posttrain reward-model` the rows of data) that the stage
has gone over, of those that it goes over in all. Of a data set: its lines.""",
    "checks": """\
What is proved on the first batch of a run before anything is learnt: that every group is complete, that rollout
and trainer give the same log-probs, and that the largest batch fits into memory.

More: docs/architecture.md.""",
    "log-prob": """\
The logarithm of the probability that the policy gives a token. Old log-probs are those of the policy that sampled
the responses: the stage `old log-probs` computes them where a batch is updated on more than once. The ratio of new
to old is what the loss clips.

Settings: actor_rollout_ref.actor.old_log_probs. Metrics: mismatch/logp_mean (rollout and trainer must agree).
More: `posttrain explain clip`.""",
    "probabilities": """\
The stage of a step that sums squared probabilities over the vocabulary, which `optimal_token_baseline` needs.""",
    "values": """\
The stage of a step in which the critic predicts the reward at every token. See `posttrain explain critic`.""",
    "weight sync": """\
Giving the updated weights to the rollout engine, so that the next responses come from the new policy. It is proved
after each sync that both compute the same log-probs (sync/probe_max).

Metrics: sync/probe_max, timing_s/sync. More: docs/layouts.md.""",
    "load": """\
The stage before the first step in which models are read and workers are made.""",
    "saving": """\
The stage in which a checkpoint is written. See `posttrain explain checkpoint`.""",
    "validation": """\
Answering and scoring held-out prompts, without learning from them: what to judge a run by. `val/SOURCE/mean@1` is
the mean score with one response for each prompt.

Settings: data.val_files, trainer.test_freq, trainer.val_before_train, actor_rollout_ref.rollout.val_kwargs.n.
More: docs/evaluation.md; `posttrain explain pass@k`.""",
    "perplexity": """\
exp(loss) of a supervised run: over how many tokens the model hesitates on average. Lower is better; compare it
between runs with one tokenizer only.

Metrics: val/perplexity. More: docs/sft.md.""",
    "accuracy": """\
Of a reward model: the share of pairs whose better answer has the higher score; 0.5 is chance. Of RL: see
`posttrain explain right/mean` and `posttrain explain pass@k`.

Metrics: train/accuracy, val/accuracy. More: docs/reward_models.md.""",
    "margin": """\
Of a reward model: the score of the better answer less that of the worse, as a mean over pairs.

Metrics: train/margin, val/margin. More: docs/reward_models.md.""",
    "on-policy": """\
Learning from responses of the policy as it is now. A batch is on-policy at its first optimizer step; with several
mini-batches or ppo_epochs later ones are off-policy, which the clipped ratio corrects for.

Settings: actor_rollout_ref.actor.ppo_mini_batch_size, actor_rollout_ref.actor.ppo_epochs.
More: `posttrain explain ratio`.""",
    "off-policy": """\
Learning from responses of an older policy: after several optimizer steps on a batch, or with trainer.one_step_off.
The clipped ratio and importance weights correct for the difference.

Settings: actor_rollout_ref.actor.ppo_epochs, trainer.one_step_off. More: `posttrain explain rollout_correction`.""",
    "seed": """\
Where random numbers begin. The same command with the same seed on the same machine gives the same run.

Settings: trainer.seed, data.seed, trainer.deterministic.""",
    "overfitting": """\
Learning training prompts by heart: training reward rises (or loss falls) while validation gets worse. Take fewer
epochs, more data, or an earlier checkpoint; the best one by validation is kept.

Settings: trainer.total_epochs, trainer.test_freq, trainer.max_ckpt_to_keep.""",
    "kv cache": """\
Keys and values of the tokens so far, which the rollout engine keeps so that a new token need not compute them
again. It decides how many responses are generated at once.

Settings: actor_rollout_ref.rollout.kv_cache_gb, actor_rollout_ref.rollout.max_num_seqs,
actor_rollout_ref.rollout.gpu_memory_utilization. More: docs/rollout.md, docs/plan.md.""",
    "out of memory": """\
The run needs more memory than the device has. `posttrain plan` with the run's arguments says which stage, and what
would lower it: shorter passes first (no result changes), then gradient checkpointing, offloading, LoRA.

Settings: actor_rollout_ref.actor.ppo_max_token_len_per_gpu, actor_rollout_ref.model.enable_gradient_checkpointing,
actor_rollout_ref.actor.fsdp_config.param_offload, actor_rollout_ref.model.lora_rank.
More: docs/plan.md, docs/troubleshooting.md.""",
    "worker": """\
A process that holds a model on one device: a rank. One is started for each GPU; reward workers are others, which
score.

Settings: trainer.n_gpus_per_node, trainer.nnodes, reward.num_workers. More: docs/workers.md.""",
    "rlhf": """\
Reinforcement learning from human feedback: a reward model learns which answers people prefer, and PPO (or GRPO)
learns to please it. Here: `posttrain reward-model`, then a run with reward_model.enable=True.

Settings: reward_model.enable, reward_model.model.path. More: docs/reward_models.md, docs/ppo.md.""",
    "rlvr": """\
Reinforcement learning with verifiable rewards: a program checks the answer (a number, a test, a format). It needs
no reward model; this is what runs do here by default.

Settings: custom_reward_function.path. More: docs/rewards.md, docs/own_reward.md.""",
    "dpo": """\
Direct preference optimization, which learns from pairs without sampling, is not built here. The nearest: a reward
model from the same pairs (`posttrain reward-model`), and GRPO or PPO with it.

More: docs/reward_models.md.""",
}

# Other names of these and other pages; blanks stand for `_` and `-` as well, and a plural for its singular.
SPELLINGS: dict[str, str] = {
    "adv": "advantage",
    "kl divergence": "kl",
    "kl loss": "kl_loss",
    "clipping": "clip",
    "clip ratio": "clip",
    "clip range": "clip",
    "ref": "reference",
    "ref policy": "reference",
    "reference model": "reference",
    "reference policy": "reference",
    "ckpt": "checkpoint",
    "saved": "checkpoint",
    "best checkpoint": "checkpoint",
    "batch": "batch size",
    "train batch size": "batch size",
    "minibatch": "mini-batch",
    "mini batch size": "mini-batch",
    "microbatch": "micro-batch",
    "micro batch size": "micro-batch",
    "gen": "rollout",
    "generation": "rollout",
    "group size": "rollout.n",
    "grad norm": "gradient norm",
    "grad clip": "gradient norm",
    "lr": "learning rate",
    "warmup": "warm-up",
    "adam": "optimizer",
    "adamw": "optimizer",
    "optimizer step": "optimizer",
    "reference answer": "ground truth",
    "tokens per second": "tok/s",
    "throughput": "tok/s",
    "response length": "response_length",
    "completion": "response",
    "completion length": "response_length",
    "logprob": "log-prob",
    "log probability": "log-prob",
    "old log-prob": "log-prob",
    "old log-probs": "log-prob",
    "sync": "weight sync",
    "value function": "value",
    "value model": "critic",
    "score": "scores",
    "val": "validation",
    "eval": "validation",
    "trajectory": "rollout",
    "episode": "rollout",
    "importance weight": "rollout_correction",
    "importance sampling": "rollout_correction",
    "importance ratio": "ratio",
    "discount": "return",
    "gamma": "return",
    "random seed": "seed",
    "oom": "out of memory",
    "dataset": "prompt",
    "rank": "worker",
    "gpu": "worker",
    "ray": "worker",
    "vllm": "rollout",
    "sglang": "rollout",
    "bf16": "dtype",
    "bfloat16": "dtype",
    "mean@": "validation",
    "pass@": "pass@k",
    "maj@": "maj@k",
}
