#!/usr/bin/env bash
# GRPO over several turns: Qwen2-7B-Instruct searches with a tool before it answers.
#   waits    for the engine SGLang, which is not built: the script says so and ends with status 69. The command below runs
#            with actor_rollout_ref.rollout.name=native.
#   needs    then: $HOME/data/nq_open/{train,validation}.parquet (`posttrain data nq_open` makes them), a CUDA GPU, and
#            SEARCH_API_KEY; without it the tool searches a local index
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
not_yet "the engine SGLang is not built; actor_rollout_ref.rollout.name=native serves the same turns and tools (docs/tools.md)."
use_checkout
prepare_python
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$HOME/data/nq_open/train.parquet" \
  data.val_files="$HOME/data/nq_open/validation.parquet" \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.multi_turn=True \
  actor_rollout_ref.rollout.max_turns=5 \
  actor_rollout_ref.rollout.tools='["search"]' \
  actor_rollout_ref.rollout.tool_config.search.api_key="${SEARCH_API_KEY:-}" \
  actor_rollout_ref.rollout.n=5 \
  trainer.project_name=verl_multiturn_example \
  trainer.experiment_name=qwen2_7b_search \
  ${small[@]+"${small[@]}"} \
  "$@"
