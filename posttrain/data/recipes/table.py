"""All recipes that prepare a published data set, in the order in which `posttrain data --help` lists them."""

from __future__ import annotations

from posttrain.data.recipes import banking77, gsm8k, hh_rlhf, math, programs, questions
from posttrain.data.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        gsm8k.RECIPE,
        math.MATH,
        math.MATH500,
        programs.MBPP,
        programs.HUMANEVAL,
        questions.NQ_OPEN,
        questions.HOTPOTQA,
        banking77.RECIPE,
        hh_rlhf.PAIRS,
        hh_rlhf.CONVERSATIONS,
    )
}
