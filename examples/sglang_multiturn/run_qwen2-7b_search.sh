#!/usr/bin/env bash
# GRPO over several turns: Qwen2-7B-Instruct searches with a tool before it answers.
#   needs    $HOME/data/nq_open/{train,validation}.parquet (`posttrain data nq_open` makes them), a CUDA GPU, and
#            SEARCH_API_KEY: of Tavily or Serper, or of a server of yours that SEARCH_API_URL=http://HOST/retrieve names;
#            without a key the tool searches a local index. SGLang must be installed (docs/rollout.md): without it the run says so and
#            ends. Add
#              actor_rollout_ref.rollout.name=native
#            which serves the same turns and tools (docs/tools.md).
#   expect   responses of up to five turns; samples show each call with its answer (`posttrain samples RUN`), and
#            num_turns/mean and tools/calls stand in the metrics, in outputs/verl_multiturn_example/qwen2_7b_search
#   small    SMOKE=1 bash examples/sglang_multiturn/run_qwen2-7b_search.sh: the embedded model learns to call the tool by
#            a short SFT, then two steps with rollout.name=native; a minute or two on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray "$@")"
smoke search

start posttrain.trainer.main_ppo \
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
