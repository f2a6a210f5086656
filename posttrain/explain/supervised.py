"""Pages of `posttrain explain` about the supervised trainers: topics and metrics, name -> text."""

TOPICS: dict[str, str] = {
    "sft": """\
Supervised fine-tuning: a causal language model learns given responses, or the assistant's turns of conversations.

    loss = - mean over all trained tokens of a step of log p(token | what stands before it)

Trained are the tokens that the model would write itself, up to the one that ends a turn; prompts, headers of turns and
padding are not. The mean is over the whole step, so neither packing nor the split into passes changes the gradient.

When to use: before RL, so that the policy knows the form of an answer and is sometimes right; or alone, where good
responses exist and no reward does.

Command: `posttrain sft key=value ...`; `posttrain config sft` lists every setting, `posttrain plan sft key=value ...`
predicts its memory.

Settings: model.path, data.train_files, data.val_files, data.response_key, data.multiturn.enable, data.max_length,
data.train_batch_size, optim.lr, trainer.total_epochs, model.lora_rank (see `lora`).

Watch: val/loss, train/grad_norm, train/trained_tokens.

Signs of failure: a val/loss that rises while train/loss falls (too many epochs: the best checkpoint is kept); a loss
that does not move (learning rate too low; adapters want about ten times that of all weights).""",
    "reward-model": """\
A reward model learns from pairs to give the better answer the higher score.

    loss = -log sigmoid(score(better) - score(worse) - margin) + center_coef * (score(better) + score(worse))^2

This is the Bradley-Terry model of choices between two. The score is read at the last token of a conversation; a head
that is new begins at zero, so that all scores begin equal.

Source: Training language models to follow instructions with human feedback, arXiv 2203.02155; margins: Llama 2, arXiv
2307.09288.

When to use: what is wanted can be compared but not checked by a rule. Where a rule can check it, take the rule.

Command: `posttrain reward-model key=value ...`; `posttrain config reward-model` lists every setting, `posttrain plan
reward-model key=value ...` predicts its memory. In RL: reward_model.enable, reward_model.model.path.

Settings: model.path, data.train_files, data.val_files, data.chosen_key, data.rejected_key, data.margin_key,
loss.center_coef, optim.lr, model.lora_rank (see `lora`).

Watch: val/accuracy, val/margin, val/score_mean.

Signs of failure: val/accuracy stays at 0.5 (learning rate, or pairs that cannot be told apart); a val/margin that grows
while val/accuracy falls (too many epochs).""",
}

METRICS: dict[str, str] = {
    "train/loss": """\
The loss of a supervised step, before its update: of `sft` the mean negative log-likelihood of its trained tokens, of a
`reward-model` the mean loss of its pairs. It wavers with the rows; judge a run by val/loss.""",
    "val/loss": """\
The same loss over all held-out rows. It should fall and then level off; rising while train/loss falls: the rows are
being learnt by heart, so train fewer epochs or take an earlier checkpoint (the best one is kept).""",
    "val/perplexity": """\
exp(val/loss): over how many tokens the model hesitates on average. Compare it between runs with one tokenizer only.""",
    "val/accuracy": """\
Share of held-out pairs whose better answer has the higher score; equal scores count half. 0.5 is chance. People who
make such pairs agree in about 0.6 to 0.75 of them, so that 1 is often out of reach.""",
    "val/margin": """\
Mean of score(better) - score(worse) on held-out pairs. 0 with a new head. Growing with a steady val/accuracy means that
scores only become louder: loss.center_coef or fewer steps.""",
    "train/trained_tokens": """\
Tokens of the step that have a loss: the assistant's. Far below perf/total_num_tokens: prompts are long, responses
short.""",
}
