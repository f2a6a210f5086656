"""The model of a worker: its files, its tokenizer and its configuration, read when the settings are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl._config import BaseConfig
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.model import update_model_config
from verl.utils.tokenizer import hf_tokenizer


class MtpConfig(BaseConfig):
    """Multi-token prediction, which posttrain has switched off."""

    _defaults = {  # noqa: RUF012
        "enable": False,
        "enable_train": False,
        "enable_rollout": False,
        "detach_encoder": False,
        "mtp_loss_scaling_factor": 0.1,
        "method": "mtp",
        "num_speculative_tokens": 1,
    }
    _mutable_fields = frozenset()


class HFModelConfig(BaseConfig):
    """Example: `HFModelConfig(path="Qwen/Qwen3-8B").hf_config.hidden_size`."""

    _defaults = {  # noqa: RUF012
        "path": None,
        "local_path": None,
        "hf_config_path": None,
        "local_hf_config_path": None,
        "tokenizer_path": None,
        "local_tokenizer_path": None,
        "model_type": "language_model",
        "load_tokenizer": True,
        "hf_config": None,
        "generation_config": None,
        "tokenizer": None,
        "processor": None,
        "use_shm": False,
        "trust_remote_code": False,
        "custom_chat_template": None,
        "external_lib": None,
        "override_config": {},
        "enable_gradient_checkpointing": True,
        "enable_activation_offload": False,
        "use_remove_padding": True,
        "lora_rank": 0,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "target_parameters": None,
        "exclude_modules": None,
        "lora": {},
        "lora_adapter_path": None,
        "use_liger": False,
        "use_fused_kernels": False,
        "fused_kernel_options": {},
        "tiled_mlp": {"enabled": False, "num_shards": 4},
        "architectures": None,
        "mtp": MtpConfig(),
    }
    _mutable_fields = frozenset(
        {
            "model_type",
            "hf_config_path",
            "tokenizer_path",
            "hf_config",
            "generation_config",
            "tokenizer",
            "processor",
            "local_path",
            "architectures",
            "local_hf_config_path",
            "local_tokenizer_path",
            "mtp",
        }
    )

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.path is None:
            raise ValueError("HFModelConfig: path is missing, a folder or a name of the Hugging Face hub")
        modules = self.target_modules
        if not isinstance(modules, str | list | None) or any(not isinstance(one, str) for one in modules or ()):
            raise TypeError(f"target_modules must be a string or a list of strings, but got {modules!r}")
        import_external_libs(self.external_lib)
        self.hf_config_path, self.tokenizer_path = self.hf_config_path or self.path, self.tokenizer_path or self.path
        self.local_path = copy_to_local(str(self.path), use_shm=self.use_shm)
        if self.load_tokenizer:
            self.local_tokenizer_path = copy_to_local(str(self.tokenizer_path), use_shm=self.use_shm)
            self.tokenizer = hf_tokenizer(str(self.local_tokenizer_path), trust_remote_code=self.trust_remote_code)
            if self.custom_chat_template is not None:
                self.tokenizer.chat_template = self.custom_chat_template
        self.local_hf_config_path = copy_to_local(str(self.hf_config_path), use_shm=self.use_shm)
        self._read_model()

    def _read_model(self) -> None:
        from transformers import AutoConfig, GenerationConfig

        folder = str(self.local_hf_config_path)
        attention = {key: self.override_config[key] for key in ("attn_implementation",) if key in self.override_config}
        self.hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=self.trust_remote_code, **attention)
        try:
            self.generation_config = GenerationConfig.from_pretrained(folder)
        except OSError:  # the model has no such file: its own settings decide
            self.generation_config = GenerationConfig.from_model_config(self.hf_config)
        own = [] if self.tokenizer is None else ["bos_token_id", "eos_token_id", "pad_token_id"]
        changes = {name: getattr(self.tokenizer, name) for name in own}
        changes |= self.override_config.get("model_config", self.override_config)
        update_model_config(self.hf_config, changes)
        self.share_embeddings_and_output_weights = getattr(self.hf_config, "tie_word_embeddings", False)
        self.architectures = self.hf_config.architectures
        assert self.architectures is not None and len(self.architectures) == 1, (
            f"Expect only one architecture, got {self.architectures}"
        )
        if not self.mtp.enable:  # layers that predict further tokens are not loaded
            for config in (self.hf_config, getattr(self.hf_config, "text_config", None)):
                for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
                    if hasattr(config, name):
                        setattr(config, name, 0)

    def get_processor(self) -> Any:
        return self.tokenizer
