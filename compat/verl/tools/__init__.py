"""Tools by verl's interface. They can be called; rollouts that call tools are not built."""

from verl._missing import not_given

__getattr__ = not_given(__name__)
