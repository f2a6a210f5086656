#!/usr/bin/env bash
# GRPO with DeepSeek-V3 (671B, a mixture of experts) by Megatron on four machines of eight GPUs of 80 GB.
#   needs    megatron-core (`pip install "posttrain[megatron]"`), $HOME/data/math/{train,test}.parquet (`posttrain data math`
#            makes them), 32 CUDA GPUs of 80 GB; a model that the engine trains (docs/megatron.md): DeepSeek-V3's own
#            attention is not built, so behind the script give actor_rollout_ref.model.path of a Qwen3-MoE or Mixtral
#   expect   the line `Train engine: megatron-core ... (tensor 8, pipeline 4, expert 8)` before the first step
#   small    SMOKE=1 bash examples/grpo_trainer/run_deepseek671b_math_megatron_80gb.sh: two steps of the embedded model, a
#            dense one, by Megatron on one rank; no mixture of experts and no cut over ranks
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke grpo
stands_for "a dense model on one rank stands for DeepSeek-V3, which no small machine holds"
if [[ "${SMOKE:-0}" == 1 ]]; then  # one process has one rank to cut over
  small+=(actor_rollout_ref.actor.megatron_config.tensor_parallel_size=1
    actor_rollout_ref.actor.megatron_config.pipeline_parallel_size=1
    actor_rollout_ref.actor.megatron_config.expert_parallel_size=1)
fi

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$HOME/data/math/train.parquet" \
  data.val_files="$HOME/data/math/test.parquet" \
  data.train_batch_size=512 \
  data.max_prompt_length=2048 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3 \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron_config.tensor_parallel_size=8 \
  actor_rollout_ref.actor.megatron_config.pipeline_parallel_size=4 \
  actor_rollout_ref.actor.megatron_config.expert_parallel_size=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=4 \
  trainer.project_name=verl_megatron_math \
  trainer.experiment_name=deepseek_v3 \
  ${small[@]+"${small[@]}"} \
  "$@"
