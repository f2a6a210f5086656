"""transformers: `model.generate`, its continuous batching, and a policy-gradient update by its layers."""

from __future__ import annotations

import sys
from typing import Any

from wire import get_rows, largest, pick_samples, rollout_answer, serve, shares_prompts, time_call  # pyright: ignore


def load_model(job: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"], attn_implementation="sdpa")
    return model.to(job["device"])


def generate(job: dict[str, Any]):
    """One padded batch, decoded until its longest row is done; only the requested tokens are counted."""
    import torch
    from transformers import GenerationConfig

    model = load_model(job).eval()
    model.generation_config = GenerationConfig()
    settings = {"attn_implementation": "sdpa", "cache_implementation": None, "compile": False, **job["settings"]}
    if settings["compile"]:
        model.forward = torch.compile(model.forward, dynamic=None)

    def sampling(tokens: int) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=job["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            cache_implementation=settings["cache_implementation"],
        )

    def pad(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompts))
        ids = [[0] * (width - len(row)) + row for row in prompts]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
        return torch.tensor(ids, device=job["device"]), torch.tensor(mask, device=job["device"])

    @torch.inference_mode()
    def batch(ids: torch.Tensor, mask: torch.Tensor, longest: int):
        out: Any = model.generate(ids, attention_mask=mask, generation_config=sampling(longest))
        tokens_BT = out.sequences[:, ids.shape[1] :]
        chosen = [
            torch.log_softmax(logits_BV.float(), -1).gather(1, tokens_BT[:, t : t + 1])
            for t, logits_BV in enumerate(out.logits)
        ]
        log_probs = torch.cat(chosen, 1).tolist()
        return tokens_BT.tolist(), log_probs

    def run(request: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(request["seed"])
        prompts, lengths = get_rows(job, request)
        ids, mask = pad(prompts)
        seconds, (tokens, log_probs) = time_call(lambda: batch(ids, mask, max(lengths)))
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        cut = [[row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (tokens, log_probs)]
        return {**answer, **pick_samples(request, *cut)}

    return settings, run


def continuous(job: dict[str, Any]):
    """Requests enter and leave a paged cache, each with its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load_model(job).eval()
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
    sampling.eos_token_id = -1  # responses end at their length only
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
        prompts, lengths = get_rows(job, request)
        seconds, done = time_call(lambda: batch(prompts, lengths))
        tokens = [result.generated_tokens for result in done.values()]
        log_probs = [result.logprobs for result in done.values()]
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        return {**answer, **pick_samples(request, tokens, log_probs)}

    return settings, run


def update(job: dict[str, Any]):
    """Padded rows, sdpa, log-probs from whole logits, AdamW fused; weights in the job's type with float32 masters and
    moments, as posttrain has them; adapters by peft."""
    import torch

    device: str = job["device"]
    model: Any = load_model(job)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable()
        model.train()
    if job["lora_rank"]:
        from peft import LoraConfig, get_peft_model

        rank = job["lora_rank"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
        if job["checkpointing"]:
            model.enable_input_require_grads()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # Float32 masters and moments beside weights of the job's type: posttrain's precision.
    masters = [weight.detach().float().clone() for weight in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0, fused=True)
    rows = [prompt + answer for prompt, answer in zip(job["prompts"], job["responses"], strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    first = len(job["prompts"][0])
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0))
    micro = max(1, job["budget"] // width)  # rows of a pass, padded to the longest of all
    settings = {"attn_implementation": "sdpa", "rows_per_pass": micro, **job["settings"]}

    def update() -> None:
        for start in range(0, len(rows), micro):
            here = slice(start, start + micro)
            part, seen = ids[here].to(device), mask[here].to(device)
            logits = model(part, attention_mask=None if bool((mask[here] == 1).all()) else seen, use_cache=False).logits
            chosen = torch.log_softmax(logits[:, first - 1 : -1].float(), -1).gather(-1, part[:, first:, None])[..., 0]
            real = seen[:, first:]
            loss = -(chosen * real * advantages[here].to(device)).sum(1) / real.sum(1)
            (loss.sum() / len(rows)).backward()
            for weight, master in zip(trained, masters, strict=True):
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(trained, masters, strict=True):
                weight.copy_(master)
        if device == "cuda":
            torch.cuda.synchronize()

    def run(request: dict[str, Any]) -> dict[str, Any]:
        seconds, _ = time_call(update)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        return {"seconds": seconds, "computed": len(rows) * width, "passes": -(-len(rows) // micro), "peak_gib": peak}

    return settings, run


if __name__ == "__main__":
    serve({"generate": generate, "continuous": continuous, "train": update}[sys.argv[2]])
