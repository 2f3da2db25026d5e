"""How long and how fast a run trains; what it says of itself."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the loop. Raises PacelineError for a value that cannot be.

    batch_tokens: of a pack that is computed at once; `accumulate` packs make a step. warmup, final_rate: shares of the
    steps and of the learning rate. bf16: products in autocast. evaluate_every, save_every: steps; 0: at the end alone.
    """

    steps: int
    learning_rate: float
    warmup: float = 0.04
    final_rate: float = 0.05
    clip: float = 0.5
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    batch_tokens: int = 2048
    accumulate: int = 1
    seed: int = 0
    bf16: bool = False
    evaluate_every: int = 0
    save_every: int = 200

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_tokens", 1), ("accumulate", 1), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise PacelineError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise PacelineError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("warmup", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise PacelineError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, …: linear up, then half a cosine down."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
