"""How models write tool calls. A format is one file here, named after it: it reads the calls of a turn, writes a call,
and may name texts that end a turn. Nothing else has to be edited for a new one."""

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable

__all__ = ["FORMATS", "CallFormat", "Unreadable"]
