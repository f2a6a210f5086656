#!/usr/bin/env bash
# GRPO with the tools of an MCP server that raises the reward on a CPU: the embedded model learns to ask where things are.
#   needs    the package mcp, which the script installs into .venv if it is missing; two cores and a few minutes
#   expect   a short SFT shows calls of the tool and, as often, giving up. Then GRPO: the score rises from 0.24 to about 0.7,
#            and the calls per response (tools/calls) from 0.44 to 1
#            docs/environments.md has the curve; `posttrain samples outputs/environments/mcp` shows the calls
#   small    SMOKE=1 bash examples/environments/run_mcp.sh: two steps of each
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python mcp
folder=outputs
taught=140
smoke lookup

server="$RUN_PYTHON $ROOT/examples/environments/mcp_server.py"

teach() {
  "$RUN_PYTHON" "$ROOT/examples/environments/mcp_rows.py" "$folder/environments/mcp_rows" "$server"
  "$RUN_PYTHON" -m posttrain sft model.path=embedded data.train_files="$folder/environments/mcp_rows/talks.jsonl" \
    data.max_length=512 data.train_batch_size=16 optim.lr=3e-3 trainer.total_training_steps="$taught" trainer.device=cpu \
    trainer.default_local_dir="$folder" trainer.project_name=sft trainer.experiment_name=mcp
}
first=(teach)

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/environments/mcp_rows/train.jsonl" \
  data.val_files="$folder/environments/mcp_rows/test.jsonl" \
  data.train_batch_size=8 \
  data.max_prompt_length=368 \
  data.max_response_length=136 \
  actor_rollout_ref.model.path="$folder/sft/mcp/checkpoints/global_step_$taught/huggingface" \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.multi_turn=True \
  actor_rollout_ref.rollout.max_turns=2 \
  actor_rollout_ref.rollout.tools="['mcp:$server']" \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  custom_reward_function.path="$ROOT/examples/environments/mcp_rows.py" \
  reward.num_workers=1 \
  trainer.total_training_steps=20 \
  trainer.test_freq=5 \
  trainer.device=cpu \
  trainer.project_name=environments \
  trainer.experiment_name=mcp \
  ${small[@]+"${small[@]}"} \
  "$@"
