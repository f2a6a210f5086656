#!/usr/bin/env bash
# A small real model learns GSM8K on one GPU: SFT, then GRPO: scripts/smollm_gsm8k.sh MODEL DATA OUT [key=value ...]
#   MODEL  a folder with SmolLM2-135M-Instruct (scripts/smollm_from_gguf.py makes one)
#   DATA   train.parquet and test.parquet of `posttrain data gsm8k`
#   OUT    where the runs go; further keys go to the GRPO runs
#   SEEDS  "1 2 3": as many GRPO runs from the one SFT model, beside each other (1)
#   SFT    the folder of an SFT model: only the GRPO runs are made
#   TRL    seconds: after them as long a run of the same by TRL (scripts/smollm_trl.py), with 10 steps between its
#          evaluations, and OUT/curves.svg of both against the wall clock
# The whole test set's accuracy is measured before anything, after SFT, and every 20 steps. docs/gpu.md has what came out.
set -euo pipefail
MODEL=${1:?give the model folder} DATA=${2:?give the folder of train.parquet and test.parquet} OUT=${3:?give a folder}
shift 3
PYTHON=${PYTHON:-python3}
FILES=(data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet")
PLACE=(trainer.project_name=smollm trainer.default_local_dir="$OUT")
[[ -z ${TRL:-} ]] || "$PYTHON" scripts/smollm_trl.py --check # not after hours
GRPO=(posttrain.trainer.main_ppo algorithm.adv_estimator=grpo "${FILES[@]}" "${PLACE[@]}"
  actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.dtype=bfloat16
  data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=300 actor_rollout_ref.rollout.n=16
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
  actor_rollout_ref.actor.optim.lr=2e-5 actor_rollout_ref.actor.use_kl_loss=False
  trainer.total_training_steps=60 trainer.test_freq=20 trainer.val_before_train=True)
"$PYTHON" -m "${GRPO[@]}" "$@" --cfg job >/dev/null # a mistyped key is said now, not after SFT
mkdir -p "$OUT"

grpo() { # grpo NAME MODEL key=value...
  local name=$1 model=$2
  shift 2
  "$PYTHON" -m "${GRPO[@]}" actor_rollout_ref.model.path="$model" trainer.experiment_name="$name" "$@" \
    >"$OUT/$name.log" 2>&1
}

finished() { # finished PID NAME: waits for it; a run that failed ends this
  wait "$1" || { echo "$2 failed: see $OUT/$2.log" >&2; exit 1; }
}

if [[ -z ${SFT:-} ]]; then
  grpo before "$MODEL" trainer.val_only=True &
  BEFORE=$!
  "$PYTHON" -m posttrain.trainer.fsdp_sft_trainer model.path="$MODEL" model.dtype=bfloat16 "${FILES[@]}" "${PLACE[@]}" \
    data.train_batch_size=64 data.max_length=1024 data.max_token_len_per_gpu=32768 \
    optim.lr=1e-4 optim.lr_scheduler=cosine optim.lr_warmup_steps_ratio=0.05 trainer.total_epochs=4 \
    trainer.experiment_name=sft >"$OUT/sft.log" 2>&1 &
  finished $! sft
  SFT=$(find "$OUT/smollm/sft/checkpoints" -name huggingface -type d | tail -1)
  finished "$BEFORE" before
fi

RUNS=() PROCESSES=()
for seed in ${SEEDS:-1}; do
  grpo "grpo-$seed" "$SFT" trainer.seed="$seed" "$@" &
  RUNS+=("$OUT/smollm/grpo-$seed") PROCESSES+=("$!=grpo-$seed")
done
for run in "${PROCESSES[@]}"; do finished "${run%%=*}" "${run#*=}"; done
grep -hs "^validation" "$OUT"/{before,sft,grpo-*}.log || true # some of them are not there with SFT

if [[ -n ${TRL:-} ]]; then
  "$PYTHON" scripts/smollm_trl.py "$SFT" "$DATA" "$OUT/trl" --seconds "$TRL" --every 10 >"$OUT/trl.log" 2>&1
  for weights in "$OUT"/trl/step_*; do
    "$PYTHON" -m posttrain.cli eval "$weights" --data "$DATA/test.parquet" --max-tokens 300 --out "$weights/eval" \
      >"$weights/eval.log" 2>&1
  done
  "$PYTHON" scripts/smollm_curves.py "$OUT/curves" "${RUNS[@]}" "$OUT/trl"
fi
