#!/usr/bin/env bash
# GRPO with an OpenEnv server that raises the reward on a CPU: the embedded model guesses a number, and learns to read the answer.
#   needs    the package openenv, which the script installs into .venv if it is missing; two cores and two minutes
#   expect   the mean score of 36 games rises from about 0.1 to 0.83; guessing 5 always has 0.75
#            docs/environments.md has the curve; `posttrain samples outputs/environments/openenv` shows the games
#   small    SMOKE=1 bash examples/environments/run_openenv.sh: two steps
# The server is started on a free port and stopped at the end; URL=http://HOST:PORT plays on one of yours instead.
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python openenv
folder=outputs
smoke guess

serve() {
  local port=$((20000 + RANDOM % 20000))
  URL="http://127.0.0.1:$port"
  set -m # a process group of its own: Ctrl-C is for the trainer, which still needs the server
  "$RUN_PYTHON" "$ROOT/examples/environments/openenv_server.py" "$port" &
  set +m
}
if [[ -z "${URL:-}" ]]; then serve; fi

rows() { "$RUN_PYTHON" "$ROOT/examples/agents/guess.py" "$folder/environments/openenv_rows"; }
first=(rows)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/environments/openenv_rows/train.jsonl" \
  data.val_files="$folder/environments/openenv_rows/test.jsonl" \
  data.train_batch_size=16 \
  data.max_prompt_length=64 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path=embedded \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.actor.entropy_coeff=0.01 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.environment="openenv:$URL" \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  reward.num_workers=1 \
  trainer.total_training_steps=40 \
  trainer.test_freq=10 \
  trainer.device=cpu \
  trainer.project_name=environments \
  trainer.experiment_name=openenv \
  ${small[@]+"${small[@]}"} \
  "$@"
