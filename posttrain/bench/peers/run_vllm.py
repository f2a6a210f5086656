"""vLLM: every row is a request with its own length.

On a CPU engine and worker share this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and Intel's OpenMP is preloaded; the
bench sets both. On CUDA its graphs cover every number of rows up to the slots. Prompts that occur more than once share
their prefill by prefix caching, emptied before each batch as new weights would do.
"""

from __future__ import annotations

import sys
from typing import Any

from wire import get_rows, largest, pick_samples, rollout_answer, serve, shares_prompts, time_call  # pyright: ignore


def on_cuda(slots: int, longest: int) -> dict[str, Any]:
    """Its fastest settings there: graphs for every batch size, asynchronous scheduling, long prefill passes."""
    sizes = sorted({1, 2, 4, 8, 16, 24, *range(32, slots + 1, 32), slots})
    return {
        "async_scheduling": True,
        "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": max(16384, longest + 1),
        "compilation_config": {"cudagraph_capture_sizes": [size for size in sizes if size <= slots]},
    }


def start(job: dict[str, Any]):
    from vllm import LLM, SamplingParams  # pyright: ignore

    rows, longest = largest(job)
    shared = shares_prompts(job)
    settings = {
        "dtype": job["dtype"],
        "max_num_seqs": job["slots"] or rows,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": max(4096, longest + 1),
        "enable_prefix_caching": shared,
        "enforce_eager": False,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        **(on_cuda(job["slots"] or rows, longest) if job["device"] == "cuda" else {}),
        **job["settings"],
    }
    llm = LLM(model=job["model"], seed=0, **settings)

    # `logprobs=0` gives the sampled token's log-prob alone; text is not needed, so nothing is detokenized.
    def sampling(tokens: int) -> Any:
        return SamplingParams(
            temperature=job["temperature"],
            top_p=1.0,
            top_k=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )

    def batch(prompts: Any, sampling: list[Any]):
        outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
        log_probs = [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ]
        return [list(output.token_ids) for output in outputs], log_probs

    def run(request: dict[str, Any]) -> dict[str, Any]:
        if shared:
            llm.reset_prefix_cache()
        rows, lengths = get_rows(job, request)
        prompts, samplings = [{"prompt_token_ids": row} for row in rows], [sampling(n) for n in lengths]
        seconds, (tokens, log_probs) = time_call(lambda: batch(prompts, samplings))
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        return {**answer, **pick_samples(request, tokens, log_probs)}

    return settings, run


def start_sync(job: dict[str, Any]):
    """New weights in the trainer's own process, as TRL hands them over; then one token is made with them."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams  # pyright: ignore

    settings = {
        "dtype": job["dtype"],
        "max_model_len": 64,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        **({"gpu_memory_utilization": 0.5} if job["device"] == "cuda" else {}),
        **job["settings"],
    }
    llm: Any = LLM(model=job["model"], seed=0, **settings)
    module: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    module = module.to(job["device"])
    size = sum(weight.nbytes for weight in module.parameters())
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def hand_over() -> None:
        inside = llm.llm_engine.model_executor.driver_worker.model_runner.model
        inside.load_weights(list(module.state_dict().items()))
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        seconds, _ = time_call(hand_over)
        return {"seconds": seconds, "bytes": size, "moved": size, "torch": torch.__version__}

    return settings, run


if __name__ == "__main__":
    serve(start_sync if sys.argv[2] == "sync" else start)
