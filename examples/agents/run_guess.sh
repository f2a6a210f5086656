#!/usr/bin/env bash
# GRPO with an agent that raises the reward on a CPU: the embedded model guesses a number, and learns to read the answer.
#   needs    nothing: two cores and a minute; what it makes lies in outputs/agents
#   expect   the score on held-out numbers rises from 0.1 to 0.83 in 40 steps and 0.85 in 60; without the answers it is 0.75 at most.
#            docs/own_agent.md has the curve; `posttrain samples outputs/agents/guess` has the words
#   small    SMOKE=1 bash examples/agents/run_guess.sh: two steps
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray "$@")"
folder=outputs
smoke guess

rows() { "$RUN_PYTHON" "$ROOT/examples/agents/guess.py" "$folder/agents"; }
first=(rows)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/agents/train.jsonl" \
  data.val_files="$folder/agents/test.jsonl" \
  data.train_batch_size=16 \
  data.max_prompt_length=64 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path=embedded \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.actor.entropy_coeff=0.01 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.agent="$ROOT/examples/agents/guess.py:play" \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  reward.num_workers=1 \
  trainer.total_training_steps=40 \
  trainer.device=cpu \
  trainer.project_name=agents \
  trainer.experiment_name=guess \
  ${small[@]+"${small[@]}"} \
  "$@"
