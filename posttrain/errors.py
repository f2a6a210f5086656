"""The one base of errors that a user can cause: entry points print their text as it is, without a traceback."""


class UserError(Exception):
    """Says what was wrong, where it was set and what to do."""
