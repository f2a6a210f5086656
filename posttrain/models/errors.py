"""The error of models that cannot be loaded."""

from __future__ import annotations

from posttrain.errors import UserError


class ModelError(UserError):
    """A model or tokenizer could not be loaded; the text says what to do."""
