"""Orders of rows."""

from verl._missing import not_given

__getattr__ = not_given(__name__)
