#!/usr/bin/env bash
# GRPO with a task of reasoning-gym that raises the reward on a CPU: the embedded model learns to multiply.
#   needs    the package reasoning-gym, which the script installs into .venv if it is missing; two cores and a few minutes
#   expect   after a short SFT on items with their answers 48% of the products are right, after GRPO about 60% to 70%
#            docs/environments.md has the curve; `posttrain samples outputs/environments/reasoning_gym` shows the answers
#   small    SMOKE=1 bash examples/environments/run_reasoning_gym.sh: two steps of each
#   TASK     another task with its settings; the embedded model learns few of them
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python reasoning-gym
folder=outputs
taught=150
TASK="${TASK:-products?min_digits=1&max_digits=1}"
smoke lookup

teach() {
  "$RUN_PYTHON" "$ROOT/examples/environments/reasoning_gym_rows.py" "reasoning_gym:$TASK&size=4000&seed=500000000" \
    "$folder/environments/reasoning_gym_rows/sft.jsonl"
  "$RUN_PYTHON" -m posttrain sft model.path=embedded data.train_files="$folder/environments/reasoning_gym_rows/sft.jsonl" \
    data.val_files=null data.max_length=256 data.train_batch_size=16 optim.lr=3e-3 trainer.total_training_steps="$taught" \
    trainer.device=cpu trainer.default_local_dir="$folder" trainer.project_name=sft trainer.experiment_name=reasoning_gym
}
first=(teach)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="reasoning_gym:$TASK&size=4000" \
  data.val_files="reasoning_gym:$TASK&size=200" \
  data.train_batch_size=48 \
  data.max_prompt_length=192 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path="$folder/sft/reasoning_gym/checkpoints/global_step_$taught/huggingface" \
  actor_rollout_ref.actor.ppo_mini_batch_size=12 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.rollout.n=8 \
  reward.num_workers=1 \
  trainer.total_training_steps=60 \
  trainer.test_freq=15 \
  trainer.device=cpu \
  trainer.project_name=environments \
  trainer.experiment_name=reasoning_gym \
  ${small[@]+"${small[@]}"} \
  "$@"
