#!/usr/bin/env bash
# A small real model learns a task of reasoning-gym on one GPU: scripts/smollm_reasoning_gym.sh MODEL OUT [key=value ...]
#   MODEL  a folder with SmolLM2-135M-Instruct (scripts/smollm_from_gguf.py makes one)
#   OUT    where the runs go; further keys go to the GRPO runs
#   TASK   leg_counting?min_animals=1&max_animals=2: a task, with its settings
#   SEEDS  "1 2 3": as many GRPO runs, beside each other (1)
# The model never writes the <answer> tags that the task asks for, so 256 items with their answers teach it that first
# (16 steps of SFT). Accuracy is measured on 500 other items, before GRPO and every 20 steps. docs/environments.md has
# what came out.
set -euo pipefail
MODEL=${1:?give the model folder} OUT=${2:?give a folder}
shift 2
PYTHON=${PYTHON:-python3}
TASK=${TASK:-leg_counting?min_animals=1&max_animals=2}
[[ $TASK == *\?* ]] || TASK+="?size=1000"
PLACE=(trainer.project_name=smollm trainer.default_local_dir="$OUT")
GRPO=(posttrain.trainer.main_ppo algorithm.adv_estimator=grpo "${PLACE[@]}"
  data.train_files="reasoning_gym:$TASK&size=4000" data.val_files="reasoning_gym:$TASK&size=500"
  actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.dtype=bfloat16
  data.train_batch_size=64 data.max_prompt_length=320 data.max_response_length=48 actor_rollout_ref.rollout.n=16
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
  actor_rollout_ref.actor.optim.lr=2e-5 actor_rollout_ref.actor.use_kl_loss=False
  trainer.total_training_steps=60 trainer.test_freq=20 trainer.val_before_train=True)
"$PYTHON" -m "${GRPO[@]}" "$@" --cfg job >/dev/null # a mistyped key is said now, not after SFT
mkdir -p "$OUT"

"$PYTHON" - "reasoning_gym:$TASK&size=256&seed=500000000" "$OUT/sft.jsonl" <<'ROWS'
import json
import sys

from posttrain.data.task_packages import find_source

name, file = sys.argv[1:]
with open(file, "w") as out:
    for _, row in find_source(name).read_rows(name, "data.train_files", None):
        out.write(json.dumps({"prompt": row["prompt"], "response": f"<answer>{row['ground_truth']}</answer>"}) + "\n")
ROWS
"$PYTHON" -m posttrain.trainer.fsdp_sft_trainer model.path="$MODEL" model.dtype=bfloat16 data.train_files="$OUT/sft.jsonl" \
  data.val_files=null data.train_batch_size=32 data.max_length=512 optim.lr=5e-5 trainer.total_epochs=2 "${PLACE[@]}" \
  trainer.experiment_name=sft >"$OUT/sft.log" 2>&1 || { echo "sft failed: see $OUT/sft.log" >&2; exit 1; }
SFT=$(find "$OUT/smollm/sft/checkpoints" -name huggingface -type d | tail -1)

PROCESSES=()
for seed in ${SEEDS:-1}; do
  "$PYTHON" -m "${GRPO[@]}" actor_rollout_ref.model.path="$SFT" trainer.seed="$seed" "$@" \
    trainer.experiment_name="grpo-$seed" >"$OUT/grpo-$seed.log" 2>&1 &
  PROCESSES+=("$!=grpo-$seed")
done
for run in "${PROCESSES[@]}"; do
  wait "${run%%=*}" || { echo "${run#*=} failed: see $OUT/${run#*=}.log" >&2; exit 1; }
done
grep -s "^validation" "$OUT"/grpo-*.log
