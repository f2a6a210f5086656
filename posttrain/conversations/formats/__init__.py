"""How models write tool calls. A format is one file here, named after it: it reads the calls of a turn, writes a call,
and names the text that closes a turn of calls. Nothing else has to be edited for a new one.

`format_proof.py` beside this package chooses the format of a run: it renders a call by the chat template and reads it
back."""
