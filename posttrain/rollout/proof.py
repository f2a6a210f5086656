"""Proof, when a rollout engine has been made, that the log-probs it reports are those of the model."""

from __future__ import annotations

import torch

from posttrain.models.forward import row_log_probs
from posttrain.models.proof import agree, proof_rows
from posttrain.rollout.base import RolloutEngine, Sampling
from posttrain.rollout.generate import generate

TOKENS = (1, 3, 2)  # of each response: rows end one after the other


@torch.no_grad()
def why_wrong(engine: RolloutEngine, module: torch.nn.Module) -> str | None:
    """None if short responses to two prompts, one of them twice, have the log-probs of a plain pass over them."""
    short, long = proof_rows(module.config)
    prompts = [short, long, long]
    try:
        outputs = generate(engine, prompts, [Sampling(max_tokens=count) for count in TOKENS], range(len(prompts)))
        engine.sleep()
        engine.wake()
        rows = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        plain = zip(row_log_probs(module, rows), TOKENS, strict=True)
        expected = [log_probs[-count:] for log_probs, count in plain]
        found = [torch.tensor(output.log_probs, device=expected[0].device) for output in outputs]
        if not agree(torch.cat(found), torch.cat(expected), module):
            return "its log-probs are not those of the model"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code may do with a cache; the engine is then thrown away
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
