# An image that trains, on CPUs and on NVIDIA GPUs:
#
#   docker build -t posttrain .
#   docker build -t posttrain --build-arg EXTRAS="[ray,wandb]" .                   # with Ray and wandb
#   docker build -t posttrain --build-arg TORCH_INDEX=URL .                        # torch from an index of CPU builds: smaller
#   docker run --rm -it -v "$PWD/runs:/runs" posttrain                             # the default run
#   docker run --rm -it --gpus all --shm-size 8g -v "$PWD/runs:/runs" posttrain --model Qwen/Qwen2.5-0.5B-Instruct ...
#   docker run --rm -it --entrypoint posttrain posttrain explain grpo              # any other command
#
# Rewards that run model-written code isolate it by user namespaces. Where the host forbids those inside containers,
# `posttrain doctor` says so; --security-opt seccomp=unconfined permits them.
FROM python:3.12-slim

# The compiler builds the CPU kernels when they are first used; git lets pip install packages from repositories.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

ARG TORCH="torch>=2.11,<2.14"
ARG TORCH_INDEX=""
ARG EXTRAS=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

WORKDIR /opt/posttrain
COPY pyproject.toml README.md LICENSE reward_func.py ./
COPY posttrain ./posttrain
RUN pip install --no-cache-dir ".${EXTRAS}"

# Model, kernels and run directories outlive the container where these are volumes.
ENV POSTTRAIN_CACHE=/runs/cache PYTHONUNBUFFERED=1
WORKDIR /runs
ENTRYPOINT ["posttrain", "train"]
