"""transformers' `model.generate`: one padded batch, decoded until its longest row is done.

It takes one length per batch, so rows that need less run on; only the tokens asked for are counted.
"""

from __future__ import annotations

from typing import Any

from wire import rollout_answer, rows_of, sampled, serve, timed  # pyright: ignore


def start(job: dict[str, Any]):
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"], attn_implementation="sdpa")
    model = model.eval().to(job["device"])
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

    def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
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
        prompts, lengths = rows_of(job, request)
        ids, mask = padded(prompts)
        seconds, (tokens, log_probs) = timed(lambda: batch(ids, mask, max(lengths)))
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        cut = [[row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (tokens, log_probs)]
        return {**answer, **sampled(request, *cut)}

    return settings, run


if __name__ == "__main__":
    serve(start)
