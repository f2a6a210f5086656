"""Passes over pairs of rows: both answers of a pair are always in the same one, and their beginning is computed once.

A batch holds the better and the worse answer of each pair one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from posttrain.engine.facts import EngineFacts
from posttrain.engine.packing import Unit, plan_micro_batches, plan_units
from posttrain.protocol import DataProto


def plan_pairs(data: DataProto, facts: EngineFacts) -> list[list[Unit]]:
    """By pair, the units that its rows are computed in."""
    return [_pair(data, row, facts) for row in range(0, len(data), 2)]


def _pair(data: DataProto, first: int, facts: EngineFacts) -> list[Unit]:
    costs = {"width": facts.width, "all_pairs": facts.all_pairs, "joining": facts.joining}
    units = plan_units(data[[first, first + 1]], share=facts.shares_prompts, **costs)
    return [replace(unit, rows=[first + row for row in unit.rows]) for unit in units]


def passes_of_pairs(pairs: list[list[Unit]], facts: EngineFacts) -> list[list[Unit]]:
    """The units of each pass; `facts.max_rows` counts pairs."""
    whole = [Unit([number], [0], sum(unit.tokens for unit in pair)) for number, pair in enumerate(pairs)]
    passes = plan_micro_batches(whole, token_budget=facts.token_budget, max_rows=facts.max_rows)
    return [[unit for chosen in units for unit in pairs[chosen.rows[0]]] for units in passes]
