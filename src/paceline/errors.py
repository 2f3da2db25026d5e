"""The one exception that a user is meant to read."""


class PacelineError(Exception):
    """A user's error: one line that says what is wrong, and a hint that says what to change."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(" ".join(message.splitlines()))  # a library's own words may have several
        self.hint = hint
