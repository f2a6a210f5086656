#!/usr/bin/env bash
# GRPO with all weights of Qwen2.5-0.5B-Instruct on one GPU of 24 GB: 10.9 GiB (`posttrain plan`).
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them)
#   expect   1,740 steps (15 epochs of 116 batches of 64 questions, 8 answers each); into outputs/tuning
#   small    SMOKE=1 bash examples/tuning/0.5b/run_qwen2_5-0.5b_grpo_1_gpu_24gb.sh: two steps of the embedded model, seconds on a CPU
#   tune     `posttrain plan` with these settings says which stage needs the most memory and what lowers it;
#            docs/tuning.md says what each setting costs. What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  data.train_batch_size=64 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.max_num_seqs=256 \
  trainer.val_before_train=False \
  trainer.test_freq=10 \
  trainer.save_freq=50 \
  trainer.max_ckpt_to_keep=2 \
  trainer.project_name=tuning \
  trainer.experiment_name=qwen2_5-0.5b_grpo_1_gpu_24gb \
  ${small[@]+"${small[@]}"} \
  "$@"
