#!/usr/bin/env bash
# GRPO with LoRA on GSM8K, Qwen2.5-3B-Instruct: adapters of rank 16 on queries and values, the base frozen.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them) and a CUDA GPU; `posttrain plan`
#            with these settings says how much memory it takes.
#   expect   105 steps (15 epochs of 7). Each checkpoint holds the adapters and their optimizer state alone; metrics,
#            samples and checkpoints lie in outputs/verl_grpo_example/qwen2_5_3b_grpo_lora
#   then     posttrain export outputs/verl_grpo_example/qwen2_5_3b_grpo_lora/checkpoints/global_step_105 my_model
#   small    SMOKE=1 bash examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.peft_config.peft_type=lora \
  actor_rollout_ref.actor.peft_config.lora_r=16 \
  actor_rollout_ref.actor.peft_config.lora_alpha=32 \
  actor_rollout_ref.actor.peft_config.target_modules='["q_proj","v_proj"]' \
  actor_rollout_ref.actor.optim.lr=3e-5 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.rollout.enable_lora=True \
  actor_rollout_ref.rollout.max_num_seqs=512 \
  trainer.total_epochs=15 \
  trainer.project_name=verl_grpo_example \
  trainer.experiment_name=qwen2_5_3b_grpo_lora \
  ${small[@]+"${small[@]}"} \
  "$@"
