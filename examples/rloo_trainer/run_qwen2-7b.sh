#!/usr/bin/env bash
# RLOO on GSM8K with Qwen2-7B-Instruct: each answer against the mean of the others to the same question, KL in the reward.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them) and 8 CUDA GPUs of 80 GB on one
#            machine: about 54 GiB each (`posttrain plan`). On one GPU of 80 GB add these four (34 GiB):
#              actor_rollout_ref.actor.optim.lr=2e-5
#              trainer.n_gpus_per_node=1 actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.rollout.max_num_seqs=256
#   expect   105 steps (15 epochs of 7); each answers 1024 questions 5 times and makes 4 optimizer steps. Everything lies
#            in outputs/verl_rloo_example/qwen2_7b
#   small    SMOKE=1 bash examples/rloo_trainer/run_qwen2-7b.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray $([[ "${SMOKE:-0}" == 1 ]] || echo trainer.n_gpus_per_node=8) "$@")"
smoke grpo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=rloo \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  trainer.n_gpus_per_node=8 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  trainer.project_name=verl_rloo_example \
  trainer.experiment_name=qwen2_7b \
  ${small[@]+"${small[@]}"} \
  "$@"
