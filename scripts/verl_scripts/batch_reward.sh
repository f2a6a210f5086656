#!/usr/bin/env bash
# RLOO (vectorized), a reward function that scores a whole batch, lists within quotes, validation first.
set -x
data=$HOME/data/math
train_files="['$data/train.parquet','$data/more.parquet']"
test_files="['$data/test.parquet']"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo_vectorized \
    algorithm.use_kl_in_reward=False \
    "data.train_files=$train_files" \
    "data.val_files=$test_files" \
    data.train_batch_size=256 \
    data.val_batch_size=1312 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.shuffle=True \
    data.seed=42 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \
    actor_rollout_ref.model.use_liger=False \
    actor_rollout_ref.actor.optim.lr=5e-7 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=k3+ \
    actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.temperature=0.8 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=256 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    actor_rollout_ref.rollout.val_kwargs.n=2 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 \
    reward_model.enable=False \
    reward_model.reward_manager=batch \
    reward_model.launch_reward_fn_async=True \
    custom_reward_function.path=batch_reward_fn.py \
    custom_reward_function.name=score_all \
    trainer.logger="['console','swanlab']" \
    trainer.project_name=math \
    trainer.experiment_name=rloo_batch \
    trainer.val_before_train=True \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.remove_previous_ckpt_in_save=False \
    trainer.total_epochs=3 "${@}"
