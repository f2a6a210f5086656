# Sourced by the examples, after scripts/env.sh. `smoke KIND` sets the array `small`, which stands behind a script's own
# settings: empty, or with SMOKE=1 two steps of the embedded model on the embedded data by a CPU, into a new folder
# ($SMOKE_OUT if it is set). KIND: grpo, deepseek (a tiny DeepSeek-V3 by Megatron on two ranks), ppo (with a critic),
# ppo_rm (and a reward model), search (with a tool), lookup (the embedded model itself, taught by SFT: into $folder, of
# $taught steps), guess (the embedded model itself: into $folder), sft or chats. Engines that a CPU may lack are replaced
# by `native`, and the run says so.
# `start MODULE key=value ...` runs a trainer after what must be made for it (`first`, a command; empty if nothing). Its
# settings are read before that, so that a mistyped key is said at once.
# `stands_for SENTENCE` says with SMOKE=1 what the small run does not show.
# `not_yet SENTENCE` ends a script whose run waits for a part of posttrain that is not built, with status 69.
small=()
first=()
SMOKE_SETTINGS="$ROOT/examples/smoke"

smoke() {
  if [[ "${SMOKE:-0}" != 1 ]]; then return; fi
  local out="${SMOKE_OUT:-$(mktemp -d)}"
  echo "SMOKE=1: two steps of the embedded model on a CPU, into $out"
  small=(trainer.total_training_steps=2 trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1
    trainer.logger=[console] trainer.default_local_dir="$out")
  if [[ "$1" == sft || "$1" == chats ]]; then
    small+=(model.path=embedded data.max_length=64)
    if [[ "$1" == sft ]]; then small+=(data.train_files=embedded data.val_files=embedded data.response_key=ground_truth); fi
    if [[ "$1" == chats ]]; then
      "$RUN_PYTHON" "$SMOKE_SETTINGS/chats.py" "$out/chats.jsonl"
      small+=(data.train_files="$out/chats.jsonl" data.val_files="$out/chats.jsonl" data.train_batch_size=8)
    fi
    return
  fi
  if [[ "$1" == lookup || "$1" == guess ]]; then
    folder="$out" taught=2
    small+=(data.val_max_samples=16)
    return
  fi
  echo "SMOKE=1: rollout.name=native generates, also where the script names vllm or sglang"
  small+=(actor_rollout_ref.model.path=embedded data.train_files=embedded data.val_files=embedded data.val_max_samples=16
    data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8
    actor_rollout_ref.rollout.name=native actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.actor.ppo_mini_batch_size=4 reward.num_workers=1)
  if [[ "$1" == ppo* ]]; then small+=(critic.model.path=embedded); fi
  if [[ "$1" == ppo_rm ]]; then
    first=(smoke_reward_model "$out")
    small+=(reward_model.model.path="$out/rm/sums/checkpoints/global_step_2/huggingface" trainer.critic_warmup=1)
  fi
  if [[ "$1" == deepseek ]]; then
    "$RUN_PYTHON" "$SMOKE_SETTINGS/deepseek.py" "$out/model"
    # Random weights solve no sum: the entropy gives them a gradient.
    small+=(actor_rollout_ref.model.path="$out/model" trainer.n_gpus_per_node=2
      actor_rollout_ref.actor.entropy_coeff=0.01
      actor_rollout_ref.actor.megatron_config.tensor_parallel_size=2
      actor_rollout_ref.actor.megatron_config.pipeline_parallel_size=1
      actor_rollout_ref.actor.megatron_config.expert_parallel_size=2)
  fi
  if [[ "$1" == search ]]; then
    first=(smoke_search "$out" 100)
    small+=(actor_rollout_ref.model.path="$out/sft/search/checkpoints/global_step_100/huggingface"
      data.train_files="$out/questions.jsonl" data.val_files="$out/questions.jsonl"
      data.train_batch_size=4 data.max_prompt_length=560 data.max_response_length=400
      actor_rollout_ref.rollout.tool_config.search.corpus=embedded)
  fi
}

start() {
  if ((${#first[@]})); then
    "$RUN_PYTHON" -m "$@" --cfg job >/dev/null
    "${first[@]}"
  fi
  exec "$RUN_PYTHON" -m "$@"
}

# A reward model of two steps, trained on pairs of right and wrong sums.
smoke_reward_model() {
  "$RUN_PYTHON" "$SMOKE_SETTINGS/pairs.py" "$1/pairs.jsonl"
  "$RUN_PYTHON" -m posttrain reward-model model.path=embedded data.train_files="$1/pairs.jsonl" data.train_batch_size=8 \
    trainer.total_training_steps=2 trainer.device=cpu trainer.default_local_dir="$1" trainer.project_name=rm \
    trainer.experiment_name=sums
}

# The embedded model never called a tool: a short SFT shows it how, on a few of the tool's embedded facts.
smoke_search() {
  "$RUN_PYTHON" "$SMOKE_SETTINGS/searches.py" "$1"
  "$RUN_PYTHON" -m posttrain sft model.path=embedded data.train_files="$1/searches.jsonl" data.train_batch_size=2 \
    data.max_length=1024 optim.lr=3e-3 trainer.total_training_steps="$2" trainer.total_epochs=50 trainer.device=cpu \
    trainer.default_local_dir="$1" trainer.project_name=sft trainer.experiment_name=search
}

stands_for() {
  if [[ "${SMOKE:-0}" == 1 ]]; then echo "SMOKE=1: $1"; fi
}

not_yet() {
  echo "$(basename "$0") cannot run yet: $1" >&2
  exit 69
}
