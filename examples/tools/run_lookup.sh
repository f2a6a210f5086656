#!/usr/bin/env bash
# GRPO with a tool that raises the reward on a CPU: the embedded model learns to ask where things are.
#   needs    nothing: two cores and a few minutes; what it makes lies in outputs/tools
#   expect   a short SFT shows calls of the tool and, as often, giving up. Then GRPO: only who asks for the right thing and
#            says what the tool answered earns a reward; it rises step by step, as do the calls (tools/calls), to one in
#            nearly every response. docs/tools.md has the curve; `posttrain samples outputs/tools/lookup` has the words
#   small    SMOKE=1 bash examples/tools/run_lookup.sh: two steps of each
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray "$@")"
folder=outputs
taught=140
smoke lookup

teach() {
  "$RUN_PYTHON" "$ROOT/examples/tools/rows.py" "$folder/tools"
  "$RUN_PYTHON" -m posttrain sft model.path=embedded data.train_files="$folder/tools/talks.jsonl" data.max_length=512 \
    data.train_batch_size=16 optim.lr=3e-3 trainer.total_training_steps="$taught" trainer.device=cpu \
    trainer.default_local_dir="$folder" trainer.project_name=sft trainer.experiment_name=lookup
}
first=(teach)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/tools/train.jsonl" \
  data.val_files="$folder/tools/test.jsonl" \
  data.train_batch_size=16 \
  data.max_prompt_length=128 \
  data.max_response_length=128 \
  actor_rollout_ref.model.path="$folder/sft/lookup/checkpoints/global_step_$taught/huggingface" \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.multi_turn=True \
  actor_rollout_ref.rollout.max_turns=2 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  actor_rollout_ref.rollout.tools="['$ROOT/examples/tools/where.py:Where']" \
  custom_reward_function.path="$ROOT/examples/tools/where.py" \
  reward.num_workers=1 \
  trainer.total_training_steps=60 \
  trainer.device=cpu \
  trainer.project_name=tools \
  trainer.experiment_name=lookup \
  ${small[@]+"${small[@]}"} \
  "$@"
