"""A parser that adds some of its options when it is used, since making them takes seconds."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class LateParser(argparse.ArgumentParser):
    """An ArgumentParser whose `late`, if it is set, adds options before the first parse.

    Where it cannot import what it needs, the parser ends as with a bad option.
    """

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Add the late options, then parse."""
        late, self.late = self.late, None
        if late is not None:
            try:
                late(self)
            except ImportError as error:
                self.error(str(error))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with the message; say of a value that was taken for an option that it was."""
        if message.endswith("expected at least one argument"):
            message += " that does not begin with -"
        super().error(message)
