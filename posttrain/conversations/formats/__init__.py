"""How models write tool calls. A format reads the calls of a turn, writes a call, and names the text that closes a turn
of calls. Formats that are alike share a file here; a new one may have its own. Nothing else has to be edited for it.

`format_proof.py` beside this package chooses the format of a run: it renders a call by the chat template and reads it
back."""
