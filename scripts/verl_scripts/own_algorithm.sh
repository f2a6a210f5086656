#!/bin/bash
# An estimator and a policy loss of one's own, with settings that the command adds for them.
set -eux
export VLLM_ATTENTION_BACKEND=XFORMERS
PROJECT=${PROJECT:-"own"}
ALGO="algorithm.adv_estimator=median_grpo +algorithm.median_scale=0.5"
LOSS="actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip +actor_rollout_ref.actor.policy_loss.soft_beta=4.0"

python3 -u -m verl.trainer.main_ppo $ALGO $LOSS \
    actor_rollout_ref.model.external_lib=own_algorithm_fns \
    data.train_files=[$HOME/data/a.parquet] \
    data.val_files=$HOME/data/b.parquet \
    data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 \
    ++data.filter_overlong_prompts_workers=8 \
    actor_rollout_ref.model.path=Qwen/Qwen3-1.7B \
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    actor_rollout_ref.actor.strategy=fsdp \
    actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.mode=sync \
    actor_rollout_ref.rollout.n=6 \
    actor_rollout_ref.rollout.multi_turn.enable=False \
    actor_rollout_ref.rollout.agent.num_workers=8 \
    reward_model.reward_manager=prime \
    trainer.project_name="$PROJECT" trainer.experiment_name="run_$(date +%m%d)" \
    trainer.logger=[console,tensorboard] \
    trainer.val_before_train=false trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=1 2>&1 "$@" | tee run.log
