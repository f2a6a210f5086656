"""A policy-gradient update by transformers' own layers: padded rows, sdpa, log-probs from whole logits, AdamW fused.

Weights in the job's type with float32 masters and moments, as posttrain has them; adapters by peft.
"""

from __future__ import annotations

from typing import Any

from wire import serve, timed  # pyright: ignore


def start(job: dict[str, Any]):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    device = job["device"]
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"], attn_implementation="sdpa")
    model = model.to(device)
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
    masters = [weight.detach().float().clone() for weight in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0, fused=True)
    rows = [prompt + answer for prompt, answer in zip(job["prompts"], job["responses"], strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    first = len(job["prompts"][0])
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0))
    micro = max(1, job["budget"] // width)
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
        seconds, _ = timed(update)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        return {"seconds": seconds, "computed": len(rows) * width, "passes": -(-len(rows) // micro), "peak_gib": peak}

    return settings, run


if __name__ == "__main__":
    serve(start)
