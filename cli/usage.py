"""The error for a command line that cannot be carried out."""


class UsageError(ValueError):
    """The message says what to do instead."""
