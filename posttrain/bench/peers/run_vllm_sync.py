"""New weights for vLLM in the trainer's own process, as TRL hands them over; then one token is made with them."""

from __future__ import annotations

from typing import Any

from wire import serve, timed  # pyright: ignore


def start(job: dict[str, Any]):
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
        seconds, _ = timed(hand_over)
        return {"seconds": seconds, "bytes": size, "moved": size, "torch": torch.__version__}

    return settings, run


if __name__ == "__main__":
    serve(start)
