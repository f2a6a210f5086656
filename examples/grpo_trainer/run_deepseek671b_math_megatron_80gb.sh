#!/usr/bin/env bash
# GRPO with DeepSeek-V3 (671B, a mixture of experts) by Megatron on four machines of eight GPUs of 80 GB.
#   needs    megatron-core (pip install "posttrain[megatron]") and vLLM, which splits the model to generate;
#            $HOME/data/math/{train,test}.parquet (`posttrain data math` makes them); 32 CUDA GPUs, and the command on every
#            machine (docs/workers.md). The sizes are those that guides print. They do not fit into 80 GB: to generate over 8
#            GPUs alone takes 156 GiB of each, and all weights are trained. `posttrain plan --gpu_gb 80` with these settings
#            shows the memory of each stage, and sizes with a lower peak. Train more machines, or adapters (model.lora_rank)
#   expect   the line `Train engine: megatron-core ... (tensor 8, pipeline 4, expert 8, sequence parallel)` before the first step
#   small    SMOKE=1 bash examples/grpo_trainer/run_deepseek671b_math_megatron_80gb.sh: two steps of a tiny DeepSeek-V3 with
#            random weights on two CPU cores, by Megatron on tensor and expert ranks; rollout.name=native generates
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python ray
smoke deepseek
stands_for "a tiny DeepSeek-V3 with random weights, on two tensor and expert ranks"

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
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=4 \
  trainer.project_name=verl_megatron_math \
  trainer.experiment_name=deepseek_v3 \
  ${small[@]+"${small[@]}"} \
  "$@"
