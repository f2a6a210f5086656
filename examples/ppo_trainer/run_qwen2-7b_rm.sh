#!/usr/bin/env bash
# PPO on GSM8K's questions with Qwen2-7B-Instruct, a critic of the same size and a reward model of 2B.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them) and CUDA memory for four models of
#            which two are trained: about 344 GiB (`posttrain plan`). On one GPU of 141 GB adapters for the actor and a
#            smaller critic with the same tokens take 87 GiB:
#              actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.enable_gradient_checkpointing=True
#              critic.model.path=Qwen/Qwen2-1.5B-Instruct actor_rollout_ref.actor.optim.lr=2e-5
#   expect   7 steps (1 epoch of 1024 questions each). The reward model's score is the reward; whether answers are right is
#            recorded beside it and is what validation shows. The first 10 steps train the critic only, so that one epoch
#            changes the critic alone (the run says so): raise trainer.total_epochs for more.
#            Metrics, samples and checkpoints lie in outputs/verl_ppo_example/qwen2_7b_rm
# The reward model has a tokenizer and a chat template of its own: conversations are rendered anew for it.
#   small    SMOKE=1 bash examples/ppo_trainer/run_qwen2-7b_rm.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke ppo_rm

start posttrain.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  algorithm.gamma=1.0 \
  algorithm.lam=0.95 \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_ctrl.type=adaptive \
  algorithm.kl_ctrl.kl_coef=0.02 \
  algorithm.kl_ctrl.target_kl=0.01 \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_epochs=4 \
  actor_rollout_ref.actor.clip_ratio=0.2 \
  actor_rollout_ref.actor.entropy_coeff=0.01 \
  critic.optim.lr=1e-5 \
  critic.ppo_epochs=4 \
  critic.cliprange_value=0.2 \
  reward_model.enable=True \
  reward_model.model.path=weqweasdas/RM-Gemma-2B \
  reward_model.micro_batch_size_per_gpu=16 \
  trainer.critic_warmup=10 \
  trainer.total_epochs=1 \
  trainer.project_name=verl_ppo_example \
  trainer.experiment_name=qwen2_7b_rm \
  ${small[@]+"${small[@]}"} \
  "$@"
