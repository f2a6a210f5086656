"""Workers of supervised training: rows with given answers, one optimizer step per batch.

`SFTWorker` minimizes the mean negative log-likelihood of the assistant's tokens, `PairWorker` trains a reward model to
score the better answer of a pair above the worse one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.batch.compact import compact
from posttrain.config.model import SCORE_HEADS
from posttrain.controller.group import Calls, RoleGroup, WorkerGroup, register, to_all, to_first
from posttrain.engine.base import EngineSettings, Passes, TrainEngine
from posttrain.engine.heads import Head, ScoreHead
from posttrain.engine.registry import build_train_engine, layout_of, loading_device
from posttrain.engine.settings import SUPERVISED
from posttrain.models.loading import load_causal_lm, resolve_dtype
from posttrain.models.lora import with_adapters
from posttrain.models.scorer_loading import load_scorer
from posttrain.protocol import DataProto
from posttrain.workers.measures import SAVE_WAIT, check_update
from posttrain.workers.roles import ExportingWorker, lora_state
from posttrain.workers.update_plan import by_passes, each_once, in_row_order, parts_by_rank, reporting_ranks

TAKEN = ("accuracy", "bad_steps", "epoch", "leads", "loss", "margin", "rows", "tokens", "trained_tokens", SAVE_WAIT)
"""What a step adds to the metrics that an engine returns."""


def planned_step(group: WorkerGroup, batch: DataProto) -> Calls:
    """One optimizer step on a batch: parts that balance the ranks' tokens, in equal numbers of passes. The weights in
    the batch are those of its rows in all of it, so that shares of the loss add up."""
    if group.world_size == 1:
        return Calls([(batch, None)])
    parts, sent = parts_by_rank(batch, group), compact(batch)
    arguments = each_once(parts, lambda part: (sent[part.rows], part.passes))
    return Calls(arguments, reporting_ranks=reporting_ranks(group))


def join_steps(results: list[dict[str, Any]], calls: Calls) -> dict[str, Any]:
    """Losses are added up and tensors joined, and the longest wait for a save counts; what is left all ranks know
    alike."""
    # Each rank computed its own rows: shares of the loss add up, while norms and rates are those of all ranks already.
    own = calls.reported(results)
    joined = {name: torch.cat([part[name] for part in own]) for name, x in own[0].items() if torch.is_tensor(x)}
    if waited := max(part.get(SAVE_WAIT, 0.0) for part in results):
        joined[SAVE_WAIT] = waited
    return {**own[0], **joined, "loss": sum(part["loss"] for part in own)}


def save_wait(engine: TrainEngine) -> dict[str, float]:
    """The wait for a save in this step, if there was one."""
    return {SAVE_WAIT: waited} if (waited := engine.take_save_wait()) else {}


class SupervisedWorker(ExportingWorker):
    """A model that learns rows with given answers; `config` is an SFTConfig or a RewardTrainerConfig."""

    head: Head | None = None  # what is trained on top of the decoder; None is the language model's own head

    def __init__(self, config: Any, tokenizer: Any, device: torch.device, *, total_steps: int = 1) -> None:
        self.config, self.tokenizer, self.device, self.total_steps = config, tokenizer, device, total_steps

    @register(to_all)
    def init_model(self) -> None:
        torch.manual_seed(self.config.trainer.seed)  # what is drawn, such as adapters, is the same on every rank
        layout = layout_of(self.config, SUPERVISED, "model")
        module = self.load_model(loading_device(layout, self.device))
        self.engine = build_train_engine(module, self._settings(), layout, self.head)
        self.adapters = lora_state(self.engine.facts(), self.config.model)

    @abstractmethod
    def load_model(self, device: torch.device) -> torch.nn.Module:
        """The model to train, on `device`."""

    def _settings(self) -> EngineSettings:
        config = self.config
        return EngineSettings(
            device=self.device,
            optim=config.optim,
            total_steps=self.total_steps,
            grad_clip=config.optim.clip_grad,
            token_budget=config.data.max_token_len_per_gpu,
            max_rows=config.data.micro_batch_size_per_gpu,
            pack=config.model.use_remove_padding,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
        )


def sft_step(engine: TrainEngine, batch: DataProto, passes: Passes | None = None) -> dict[str, float]:
    """One optimizer step; gives the engine's metrics and `loss`: the share of it that these rows have."""
    total = 0.0

    def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal total
        share = -(micro.batch["loss_weights"] * outputs["log_probs"]).sum()
        total += float(share.detach())
        return share

    made = check_update(engine, engine.update(batch, loss, passes=passes), TAKEN)
    return {**made, **save_wait(engine), "loss": total}


class SFTWorker(SupervisedWorker):
    """A causal language model that learns the assistant's turns."""

    def load_model(self, device: torch.device) -> torch.nn.Module:
        model = self.config.model
        dtype = resolve_dtype(model.dtype, self.device)
        module = load_causal_lm(model, dtype=dtype, device=device, quantization=model.quantization)
        return with_adapters(module, model, role="") if model.lora_rank > 0 else module

    @register(planned_step, join_steps)
    def update(self, data: DataProto, passes: Passes | None = None) -> dict[str, Any]:
        """One optimizer step on these rows and those of the other ranks."""
        return sft_step(self.engine, data, passes)

    @register(by_passes, in_row_order)
    def log_probs(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`log_probs` of the answers."""
        found = self.engine.log_probs(data, passes=passes)
        return DataProto.from_dict({"log_probs": found["log_probs"]}) if found else DataProto()


def bradley_terry_loss(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor, *, center_coef: float = 0.0
) -> torch.Tensor:
    """(P,) losses of P pairs of a better and a worse answer:
    -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2.

    Bradley and Terry (1952) model the probability that one of two answers is preferred; Ouyang et al. (2022,
    arXiv:2203.02155) train reward models this way. The margin is from Touvron et al. (2023, arXiv:2307.09288). The
    second term, from Eisenstein et al. (2023, arXiv:2312.09244), keeps scores near zero without changing which answer
    leads.
    """
    # logsigmoid is stable for large score differences, log(sigmoid()) is not.
    loss_P = -F.logsigmoid(chosen_P - rejected_P - margin_P)
    return loss_P + center_coef * (chosen_P + rejected_P) ** 2 if center_coef else loss_P


def pair_losses(batch: DataProto, scores: torch.Tensor, center_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """((P,) losses, (P,) by how much the better answer leads)."""
    chosen, rejected = scores[::2], scores[1::2]
    margins = batch.batch["margins"][::2].to(scores)
    return bradley_terry_loss(chosen, rejected, margins, center_coef=center_coef), chosen - rejected


class PairWorker(SupervisedWorker):
    """A scorer with one score per row, from a causal LM (with a new head) or from a sequence-classification folder."""

    head = ScoreHead()

    def load_model(self, device: torch.device) -> torch.nn.Module:
        model = self.config.model
        module = load_scorer(
            str(model.path),
            device,
            resolve_dtype(model.dtype, self.device),
            pad_token_id=self.tokenizer.pad_token_id,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            new_head=True,
            allow_other_weights=model.allow_other_weights,
            quantization=model.quantization,
        )
        self.pad = module.config.get_text_config().pad_token_id
        return with_adapters(module, model, whole=SCORE_HEADS, role="") if model.lora_rank > 0 else module

    @register(to_first)
    def pad_token_id(self) -> int:
        """The model's own, which it finds the end of a row by."""
        return self.pad

    @register(planned_step, join_steps)
    def update(self, data: DataProto, passes: Passes | None = None) -> dict[str, Any]:
        """One optimizer step on these pairs and those of the other ranks; gives also the `leads` of the better ones."""
        total, leads = 0.0, [torch.zeros(0)]

        def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            nonlocal total
            losses, lead = pair_losses(micro, outputs["scores"][:, 0], self.config.loss.center_coef)
            share = (losses * micro.batch["pair_weights"][::2].to(losses.dtype)).sum()
            total += float(share.detach())
            leads.append(lead.detach().cpu())
            return share

        metrics = check_update(self.engine, self.engine.update(data, loss, passes=passes), TAKEN)
        return {**metrics, **save_wait(self.engine), "loss": total, "leads": torch.cat(leads)}

    @register(by_passes, in_row_order)
    def scores(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`scores` of all rows."""
        return DataProto.from_dict({"scores": self.engine.scores(data, passes=passes)})


class SupervisedGroup(RoleGroup):
    """The workers of a supervised run, as its loop calls them (see `workers/groups.py`)."""

    init_model = SupervisedWorker.init_model
    engine_facts = SupervisedWorker.engine_facts
    lora_state = SupervisedWorker.lora_state
    save = SupervisedWorker.save
    begin_save = SupervisedWorker.begin_save
    load = SupervisedWorker.load
    export_hf = SupervisedWorker.export_hf


class SFTGroup(SupervisedGroup):
    """A language model that learns the assistant's turns."""

    update = SFTWorker.update
    log_probs = SFTWorker.log_probs


class PairGroup(SupervisedGroup):
    """A reward model that learns from pairs."""

    pad_token_id = PairWorker.pad_token_id
    update = PairWorker.update
    scores = PairWorker.scores
