#!/usr/bin/env bash
# The figures of docs/gpu.md, in parts of less than nine minutes on one H200: scripts/gpu_figures.sh PART [FOLDER]
#
#   1 rollout 0.5B beside vLLM; distance from float32  5 step 1.5B and 7B LoRA beside TRL
#   2 rollout 7B beside vLLM: rows and long tail       6 step beside verl
#   3 step 0.5B beside TRL                             7 how decoding time grows by rows, length and model
#   4 updates of 0.5B, 1.5B, 7B in rows of 640, 16k    8 a whole step of 32k at 0.5B; sync; repetition to the bit
#   9 a real model beside TRL: SMOLLM and GSM8K are MODEL and DATA of scripts/smollm_gsm8k.sh (SFT: its SFT model)
#  10 a whole step of 16k at 7B LoRA
#
# Every bench writes FOLDER/NAME.json (each system as it is done) and FOLDER/NAME.txt. ONLY=native leaves the peers out,
# DEVICE=cpu WORK=small MODEL=1m tries a part where there is no GPU.
set -uo pipefail
PART=${1:?give a part, 1 to 10}
OUTPUT=${2:-figures}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
SECONDS_EACH=${SECONDS_EACH:-240}  # of one system to load, and for each run
mkdir -p "$OUTPUT"
STATUS=0

bench() { # bench NAME JOB options...
  local name=$1 job=$2
  shift 2
  local options=(--device "$DEVICE" --json "$OUTPUT/$name.json")
  [[ $job == sweep ]] || options+=(--deadline "$SECONDS_EACH")
  [[ -n ${ONLY:-} && $job != sweep ]] && options+=(--only "$ONLY")
  [[ -n ${WORK:-} && $job != sweep ]] && options+=(--work "$WORK")
  [[ -n ${MODEL:-} ]] && options+=(--model "$MODEL")
  echo "== $name" >&2
  "$PYTHON" -m posttrain.cli bench "$job" "$@" "${options[@]}" | tee "$OUTPUT/$name.txt" || STATUS=1
}

case $PART in
  1) bench rollout-0.5b rollout --model 0.5b --work group,tail --only native,vllm --repeat 2 --truth 64 ;;
  2) bench rollout-7b rollout --model 7b --work group,tail --only native,vllm --repeat 1 ;;
  3) bench step-0.5b step --model 0.5b --work group --only native,trl,trl-float32 ;;
  4)
    for model in 0.5b 1.5b; do
      bench "train-$model" train --model "$model" --work group
      bench "train-$model-16k" train --model "$model" --work 16k --only native
    done
    bench train-7b-lora train --model 7b --work group --prompts 16 --lora-rank 32 --repeat 2 --only native
    bench train-7b train --model 7b --work group --prompts 8 --repeat 2 --only native --budget 7680
    bench train-7b-lora-16k train --model 7b --work 16k --prompts 2 --lora-rank 32 --repeat 2 --only native
    ;;
  5)
    # TRL's passes hold what fits: 16 rows of 1.5B, 8 of 7B; adapters are float32 on both sides.
    bench step-1.5b step --model 1.5b --work group --only native,trl-float32 --steps 4 \
      --set trl-float32:per_device_train_batch_size=16 --set trl-float32:gradient_accumulation_steps=32
    bench step-7b-lora step --model 7b --work group --lora-rank 32 --only native,trl --steps 3 --set trl:bf16=true \
      --set trl:per_device_train_batch_size=8 --set trl:gradient_accumulation_steps=64
    ;;
  6)
    # It wants an environment without TRL and with transformers 5.9: VERL is a folder of its packages.
    SECONDS_EACH=520 bench step-0.5b-verl step --model 0.5b --work group --only verl --steps 2 \
      ${VERL:+--env "verl:PYTHONPATH=$VERL"}
    ;;
  7)
    bench sweep sweep --model 0.5b --rows 64,128,256,512,1024,2048,4096 --row-tokens 512 --prompt-tokens 128 \
      --length-rows 512 --lengths 128,512,1024,2048,4096,8192,16384 --whole 1024 --most-tokens 4500000 \
      --models "${MODEL:-0.1b,0.5b,1.5b,7b}" --repeat 1 --svg "$OUTPUT/sweep.svg"
    ;;
  8)
    bench sync-0.5b sync --model 0.5b
    bench step-0.5b-32k step --model 0.5b --work 32k --only native --steps 1
    "$PYTHON" scripts/check_deterministic.py --device "$DEVICE" --model "${MODEL:-0.1b}" --json "$OUTPUT/deterministic.json" || STATUS=1
    ;;
  9)
    export PYTHON TRL=${TRL:-120}
    bash scripts/smollm_gsm8k.sh "${SMOLLM:?give its folder}" "${GSM8K:?give its folder}" "$OUTPUT/smollm" \
      trainer.total_training_steps=40 || STATUS=1
    ;;
  10) SECONDS_EACH=500 bench step-7b-lora-16k step --model 7b --work 16k --lora-rank 32 --only native --steps 1 ;;
  *)
    echo "no part $PART: give 1 to 10" >&2
    exit 2
    ;;
esac
exit $STATUS
