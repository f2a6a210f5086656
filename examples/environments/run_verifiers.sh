#!/usr/bin/env bash
# GRPO with an environment of verifiers that raises the reward on a CPU: the embedded model guesses a number, and learns to read the answer.
#   needs    a Python with verifiers 0.4 (VERIFIERS_PYTHON), or the script makes a virtual environment, outputs/verifiers; two cores
#   expect   the mean score of 36 games rises from about 0.1 to about 0.85; guessing 5 always has 0.75
#            docs/environments.md has the curve; `posttrain samples outputs/environments/verifiers` shows the games
#   small    SMOKE=1 bash examples/environments/run_verifiers.sh: two steps
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python serve
folder=outputs
smoke guess

own="${VERIFIERS_PYTHON:-$folder/verifiers/bin/python}"
export PYTHONPATH="$ROOT/examples/environments:$PYTHONPATH" # where verifiers finds the taskset

install() {
  if [[ -x "$own" ]]; then return; fi
  "$RUN_PYTHON" -m venv "$folder/verifiers"
  "$RUN_PYTHON" -m pip --python "$folder/verifiers" install "verifiers>=0.4"
}
first=(install)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="verifiers:verifiers_guess?python=$own&rounds=16" \
  data.val_files="verifiers:verifiers_guess?python=$own&rounds=4" \
  data.train_batch_size=16 \
  data.max_prompt_length=64 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path=embedded \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.actor.entropy_coeff=0.01 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.environment=verifiers:verifiers_guess \
  actor_rollout_ref.rollout.agent.python="$own" \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  reward.num_workers=1 \
  trainer.total_training_steps=40 \
  trainer.test_freq=10 \
  trainer.device=cpu \
  trainer.project_name=environments \
  trainer.experiment_name=verifiers \
  ${small[@]+"${small[@]}"} \
  "$@"
