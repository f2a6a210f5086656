"""Metrics and messages as lines on the console."""

from __future__ import annotations

import datetime
import logging
import numbers
import pprint
from typing import Any

import torch


def concat_dict_to_str(dict: dict[str, Any], step: Any) -> str:
    """`step:3 - loss:0.5`; values that are no numbers are skipped."""
    shown = [f"{name}:{pprint.pformat(value)}" for name, value in dict.items() if isinstance(value, numbers.Number)]
    return " - ".join([f"step:{step}", *shown])


class LocalLogger:
    """Prints the metrics of a step."""

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Nothing is held back."""

    def log(self, data: dict[str, Any], step: Any) -> None:
        if self.print_to_console:
            print(concat_dict_to_str(data, step=step), flush=True)


class DecoratorLoggerBase:
    """Messages of a role, printed or handed to a logger; of rank 0 alone unless told otherwise."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        rank: int = 0,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role, self.logger, self.level = role, logger, level
        self.rank, self.log_only_rank_0 = rank, log_only_rank_0
        self.logging_function = self.log_by_print if logger is None else self.log_by_logging

    def log_by_print(self, log_str: str) -> None:
        if _speaks(self.rank, self.log_only_rank_0):
            print(f"{self.role} {log_str}", flush=True)

    def log_by_logging(self, log_str: str) -> None:
        if self.logger is None:
            raise ValueError("Logger is not initialized")
        if _speaks(self.rank, self.log_only_rank_0):
            self.logger.log(self.level, f"{self.role} {log_str}")


def _speaks(rank: int, first_only: bool) -> bool:
    return rank == 0 or not first_only


def print_rank_0(message: Any) -> None:
    """Printed by rank 0; by a process that has no process group, too."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(message, flush=True)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    if _speaks(rank, log_only_rank_0):
        print(f"[Rank {rank}] {message}", flush=True)


def print_with_rank_and_timer(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    if _speaks(rank, log_only_rank_0):
        print(f"[{datetime.datetime.now():%Y-%m-%d %H:%M:%S}] [Rank {rank}] {message}", flush=True)


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    if _speaks(rank, log_only_rank_0):
        logger.log(level, f"[Rank {rank}] {message}")
