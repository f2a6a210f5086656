#!/usr/bin/env bash
# Supervised fine-tuning on conversations with the newer trainer, its groups chosen.
set -xeuo pipefail
backend=${BACKEND:-fsdp}

COMMON=(
    data.train_files=$HOME/data/messages/train.parquet
    data.val_files=$HOME/data/messages/test.parquet
    data.train_batch_size=256
    data.max_length=2048
    data.pad_mode=no_padding
    data.truncation=error
    data.use_dynamic_bsz=True
    data.max_token_len_per_gpu=8192
    data.messages_key=messages
    data.ignore_input_ids_mismatch=True
    model=hf_model
    model.path=Qwen/Qwen2.5-0.5B
    model.use_remove_padding=True
    trainer.default_local_dir=$HOME/checkpoints/messages
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.logger='["console","file"]'
    trainer.project_name=sft-messages
    trainer.experiment_name=qwen2.5-0.5b
    trainer.total_epochs=2
    trainer.total_training_steps=null
    trainer.resume_mode=disable
    checkpoint.save_contents=[model,optimizer,extra,hf_model]
)
FSDP=(
    engine=${backend}
    optim=${backend}
    optim.lr=1e-5
    optim.lr_warmup_steps_ratio=0.1
    optim.weight_decay=0.1
    optim.betas="[0.9,0.95]"
    optim.clip_grad=1.0
    optim.min_lr_ratio=0.1
    optim.warmup_style=cosine
    engine.strategy=fsdp2
    engine.ulysses_sequence_parallel_size=1
    engine.fsdp_size=-1
)

torchrun --nnodes=1 --nproc-per-node ${NUM_GPUS:-8} -m verl.trainer.sft_trainer \
    "${COMMON[@]}" \
    "${FSDP[@]}" "$@"
