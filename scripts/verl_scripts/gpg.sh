#!/bin/bash
# GPG with its own loss, and REINFORCE++'s baseline a word away; keys from a variable of several lines.
set -euo pipefail
ESTIMATOR=${ESTIMATOR:-gpg}
OVERLONG="reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=1.0"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=$ESTIMATOR \
    algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.truncation='middle' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.exclude_modules=null \
    actor_rollout_ref.actor.policy_loss.loss_mode=$ESTIMATOR \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=-1 \
    actor_rollout_ref.actor.optim.betas='[0.9,0.95]' \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \
    actor_rollout_ref.actor.checkpoint.save_contents='["model","optimizer","extra","hf_model"]' \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.ignore_eos=False \
    actor_rollout_ref.rollout.disable_log_stats=True \
    actor_rollout_ref.rollout.n=5 \
    $OVERLONG \
    trainer.critic_warmup=0 \
    trainer.logger='["console","mlflow"]' \
    trainer.project_name='verl_gpg_example' \
    trainer.experiment_name='qwen2_7b' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.max_actor_ckpt_to_keep=1 \
    trainer.max_critic_ckpt_to_keep=1 \
    trainer.resume_mode=auto \
    trainer.save_freq=10 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 "$@"
