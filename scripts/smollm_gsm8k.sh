#!/usr/bin/env bash
# A small real model learns GSM8K on one GPU: SFT, then GRPO: scripts/smollm_gsm8k.sh MODEL DATA OUT [key=value ...]
#   MODEL  a folder with SmolLM2-135M-Instruct (scripts/smollm_from_gguf.py makes one)
#   DATA   train.parquet and test.parquet of `posttrain data gsm8k`
#   OUT    where the runs go; further keys go to the GRPO run
# The test set's accuracy is measured before GRPO and every 20 steps. docs/gpu.md has what came out.
set -euo pipefail
MODEL=${1:?give the model folder} DATA=${2:?give the folder of train.parquet and test.parquet} OUT=${3:?give a folder}
shift 3
PYTHON=${PYTHON:-python3}
FILES=(data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet")

"$PYTHON" -m posttrain.trainer.fsdp_sft_trainer model.path="$MODEL" model.dtype=bfloat16 "${FILES[@]}" \
  data.train_batch_size=64 data.max_length=1024 data.max_token_len_per_gpu=32768 \
  optim.lr=1e-4 optim.lr_scheduler=cosine optim.lr_warmup_steps_ratio=0.05 trainer.total_epochs=4 \
  trainer.project_name=smollm trainer.experiment_name=sft trainer.default_local_dir="$OUT"
TRAINED=$(find "$OUT/smollm/sft/checkpoints" -name huggingface -type d | tail -1)

"$PYTHON" -m posttrain.trainer.main_ppo algorithm.adv_estimator=grpo "${FILES[@]}" \
  actor_rollout_ref.model.path="$TRAINED" actor_rollout_ref.model.dtype=bfloat16 \
  data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=300 actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
  actor_rollout_ref.actor.optim.lr=2e-5 actor_rollout_ref.actor.use_kl_loss=False \
  trainer.total_training_steps=42 trainer.test_freq=20 trainer.val_before_train=True \
  trainer.project_name=smollm trainer.experiment_name=grpo trainer.default_local_dir="$OUT" "$@"
