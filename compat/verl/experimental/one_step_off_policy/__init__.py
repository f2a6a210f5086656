"""The next step's responses are generated while this one trains: `trainer.one_step_off`."""
