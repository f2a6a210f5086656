#!/usr/bin/env bash
# Supervised fine-tuning on GSM8K with Qwen2-0.5B.
#   needs    $HOME/data/gsm8k/{train,test}.parquet (`posttrain data gsm8k` makes them; columns prompt and response) and
#            about 12 GB of memory: a GPU, or the CPU with patience
#   expect   702 optimizer steps (3 epochs of 7,473 rows, 8 x 4 = 32 rows per step); the training loss falls, a validation
#            loss and perplexity are printed before and after. The model lies in outputs/sft/gsm8k_qwen_05/checkpoints/
#            global_step_702/huggingface
#   small    SMOKE=1 bash examples/sft/gsm8k/run_qwen_05.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray "$@")"
smoke sft

exec "$RUN_PYTHON" -m posttrain.trainer.fsdp_sft_trainer \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  model.path=Qwen/Qwen2-0.5B \
  model.enable_gradient_checkpointing=True \
  training.learning_rate=2e-5 \
  training.num_train_epochs=3 \
  training.per_device_train_batch_size=8 \
  training.gradient_accumulation_steps=4 \
  fsdp.strategy=fsdp2 \
  trainer.experiment_name=gsm8k_qwen_05 \
  ${small[@]+"${small[@]}"} \
  "$@"
