#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-8B on eight GPUs.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them), vLLM (pip install "posttrain[vllm]";
#            without it add actor_rollout_ref.rollout.name=native) and 8 CUDA GPUs of 80 GB on one machine: up to 72 GiB
#            each (`posttrain plan`). On one GPU of 141 GB add these six (125 GiB, most of it KV cache):
#              trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1
#              actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.rollout.max_num_seqs=256
#              actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=2e-5
#   expect   105 steps (15 epochs of 7); each answers 1024 prompts 5 times and makes 4 optimizer steps. Metrics, samples
#            and the last checkpoint lie in outputs/verl_grpo_example/qwen3_8b_grpo
#   small    SMOKE=1 bash examples/grpo_trainer/run_qwen3-8b.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray $([[ "${SMOKE:-0}" == 1 ]] || echo trainer.n_gpus_per_node=8) "$@")"
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.total_epochs=15 \
  trainer.project_name=verl_grpo_example \
  trainer.experiment_name=qwen3_8b_grpo \
  ${small[@]+"${small[@]}"} \
  "$@"
