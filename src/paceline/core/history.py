"""The tokens that a distribution may depend on: the prompt and what was generated after it."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class History:
    """Prompt and generated ids along one path. Extending makes a new value: tree nodes share no state."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Index of the generated token that comes next (0 for the first after the prompt)."""
        return len(self.generated)

    def after(self, *tokens: int) -> "History":
        """This history with `tokens` generated next."""
        return History(self.prompt, self.generated + tokens)

    def seen(self) -> set[int]:
        """Every id in prompt or output: what the repetition penalty looks at."""
        return {*self.prompt, *self.generated}

    def output_counts(self) -> Counter[int]:
        """How often each id was generated: what presence and frequency penalties look at."""
        return Counter(self.generated)

    def ends_with(self, tokens: tuple[int, ...]) -> bool:
        """True when the generated ids end in `tokens` (as in vLLM, the prompt does not count)."""
        return not tokens or self.generated[-len(tokens) :] == tokens
