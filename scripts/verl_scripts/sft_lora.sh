#!/usr/bin/env bash
# Supervised fine-tuning with LoRA under torchrun, whose count of processes comes first.
set -x
if [ "$#" -lt 2 ]; then
    echo "Usage: sft_lora.sh <nproc_per_node> <save_path> [other_configs...]"
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2

torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    +data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    data.micro_batch_size_per_gpu=64 \
    data.truncation=right \
    model.partial_pretrain=Qwen/Qwen2.5-1.5B-Instruct \
    model.lora_rank=32 \
    model.lora_alpha=16 \
    model.target_modules=all-linear \
    model.strategy=fsdp2 \
    model.fsdp_config.model_dtype=bf16 \
    optim.lr=1e-4 \
    optim.lr_scheduler=cosine \
    trainer.default_local_dir=$save_path \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=gsm8k-sft-qwen-2.5-1.5b-lora \
    trainer.logger=console \
    trainer.default_hdfs_dir=null \
    trainer.total_epochs=1 $@
