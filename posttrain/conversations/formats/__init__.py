"""How models write tool calls. A format is one file here, named after it: it reads the calls of a turn, writes a call,
and may name texts that end a turn. Nothing else has to be edited for a new one."""
