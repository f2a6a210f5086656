#!/usr/bin/env bash
# ReMax on GSM8K with Qwen2.5-3B-Instruct: the reward of the most likely answer is the baseline, so that no critic and no
# group is needed.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them) and a CUDA GPU of 141 GB: about
#            90 GiB (`posttrain plan`); actor_rollout_ref.rollout.max_num_seqs=256 takes less.
#   expect   140 steps (10 epochs of 14 batches of 512 questions, 4 answers and one greedy answer each). The reward rises;
#            everything lies in outputs/verl_remax_example/qwen2_5_3b
#   small    SMOKE=1 bash examples/remax_trainer/run_qwen2.5-3b.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=remax \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=512 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.n=4 \
  trainer.val_before_train=False \
  trainer.test_freq=5 \
  trainer.total_epochs=10 \
  trainer.project_name=verl_remax_example \
  trainer.experiment_name=qwen2_5_3b \
  ${small[@]+"${small[@]}"} \
  "$@"
