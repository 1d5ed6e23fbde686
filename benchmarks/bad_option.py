"""A value on the command line that cannot work."""


class BadOption(ValueError):  # noqa: N818 - it is the user's, and ends the command with one sentence
    """One sentence: the option, its value, the fix."""
