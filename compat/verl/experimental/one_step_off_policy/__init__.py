"""The next step's responses are generated while this one trains: `trainer.one_step_off`."""

from verl._missing import not_given

__getattr__ = not_given(__name__)
