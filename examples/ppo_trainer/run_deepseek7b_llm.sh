#!/usr/bin/env bash
# PPO on GSM8K with DeepSeek-LLM-7B-chat and a critic of the same model; rewards are the function of the data source.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them) and CUDA memory for two models in
#            training: about 250 GiB (`posttrain plan`), more than one GPU has; with one, give a smaller model to both.
#   expect   105 steps (15 epochs of 7); each answers 1024 questions once and makes 4 optimizer steps of actor and critic.
#            critic/vf_explained_var rises from 0 as the critic learns. Everything lies in
#            outputs/verl_ppo_example/deepseek_llm_7b
#   small    SMOKE=1 bash examples/ppo_trainer/run_deepseek7b_llm.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python
smoke ppo

exec "$RUN_PYTHON" -m posttrain.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  algorithm.use_kl_in_reward=False \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.use_kl_loss=False \
  critic.optim.lr=1e-5 \
  critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=True \
  critic.ppo_micro_batch_size_per_gpu=32 \
  critic.fsdp_config.param_offload=False \
  critic.fsdp_config.optimizer_offload=False \
  trainer.critic_warmup=0 \
  trainer.total_epochs=15 \
  trainer.project_name=verl_ppo_example \
  trainer.experiment_name=deepseek_llm_7b \
  ${small[@]+"${small[@]}"} \
  "$@"
