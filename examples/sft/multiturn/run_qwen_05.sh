#!/usr/bin/env bash
# Supervised fine-tuning on conversations with Qwen2.5-0.5B-Instruct: only the assistant's turns are learnt.
#   needs    $HOME/data/multiturn/{train,test}.parquet with a column `messages`, each a list of {"role", "content"} with
#            at least one assistant turn (`posttrain data hh_rlhf_sft --out $HOME/data/multiturn` makes some); a chat
#            template in the tokenizer; about 12 GB of memory
#   expect   one epoch in batches of 32 conversations; the training loss falls, a validation loss and perplexity are
#            printed before and after. The model lies in outputs/sft/multiturn_qwen_05/checkpoints/global_step_N/huggingface
#   small    SMOKE=1 bash examples/sft/multiturn/run_qwen_05.sh: two steps of the embedded model, seconds on a CPU
# What is added to the command wins.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd)"
source "$ROOT/scripts/env.sh"
source "$ROOT/examples/smoke/settings.sh"
use_checkout
prepare_python "$(wants_ray "$@")"
smoke chats

exec "$RUN_PYTHON" -m posttrain.trainer.fsdp_sft_trainer \
  data.train_files="$HOME/data/multiturn/train.parquet" \
  data.val_files="$HOME/data/multiturn/test.parquet" \
  data.multiturn.enable=True \
  data.multiturn.messages_key=messages \
  data.max_length=2048 \
  data.truncation=drop \
  data.train_batch_size=32 \
  model.path=Qwen/Qwen2.5-0.5B-Instruct \
  model.enable_gradient_checkpointing=True \
  optim.lr=1e-5 \
  fsdp.strategy=fsdp2 \
  trainer.total_epochs=1 \
  trainer.experiment_name=multiturn_qwen_05 \
  ${small[@]+"${small[@]}"} \
  "$@"
