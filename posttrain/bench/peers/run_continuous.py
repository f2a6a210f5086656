"""transformers' continuous batching: requests enter and leave a paged cache, each with its own length."""

from __future__ import annotations

from typing import Any

from wire import largest, rollout_answer, rows_of, sampled, serve, shares_prompts, timed  # pyright: ignore


def start(job: dict[str, Any]):
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"], attn_implementation="sdpa")
    model = model.eval().to(job["device"])
    rows, longest = largest(job)
    page = 32
    settings = {
        "page_size": page,
        "num_blocks": rows * (longest // page + 2),
        "max_batch_tokens": max(1024, rows),
        "max_requests_per_batch": rows,
        "allow_block_sharing": shares_prompts(job),
        **job["settings"],
    }
    sampling = GenerationConfig(
        do_sample=True, temperature=job["temperature"], top_k=0, top_p=1.0, max_new_tokens=longest
    )
    sampling.eos_token_id = -1
    manager = model.init_continuous_batching(
        generation_config=sampling,
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **settings),
    )
    manager.start()

    def batch(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        names = [
            manager.add_request(list(prompt), max_new_tokens=n, eos_token_id=-1)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        done: dict[str, Any] = {}
        while len(done) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("the generation thread ended")
        return {name: done[name] for name in names}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = rows_of(job, request)
        seconds, done = timed(lambda: batch(prompts, lengths))
        tokens = [result.generated_tokens for result in done.values()]
        log_probs = [result.logprobs for result in done.values()]
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        return {**answer, **sampled(request, tokens, log_probs)}

    return settings, run


if __name__ == "__main__":
    serve(start)
