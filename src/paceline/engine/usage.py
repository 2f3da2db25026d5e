"""What `auto` did, and why: sums over an engine's life, in a line and in JSON."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROWS_COST = "rows cost more than they return"
DRAFTS_COST = "drafting costs more than it returns"
SELDOM_RIGHT = "drafts are seldom right"
LOOKUPS_REST = "lookups were of no use for a while, and are asked less often"
NOTHING_FOUND = "there is nothing to draft from"


@dataclass(slots=True)
class MethodUse:
    """One method's drafts that were verified."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_length(self) -> float:
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else 0.0


@dataclass(slots=True)
class Usage:
    """Choices made (one a sequence and step), and the time that they took beside what plain decoding would have."""

    methods: dict[str, MethodUse] = field(default_factory=dict)
    num_choices: int = 0
    num_probes: int = 0
    off: Counter[tuple[int, str]] = field(default_factory=Counter)  # by sequences that ran, and the reason
    seconds: float = 0.0
    plain_seconds: float = 0.0
    left_out: Mapping[str, float] = field(default_factory=dict)  # heads that do not pay here: speed-up at the best

    def of(self, method: str) -> MethodUse:
        return self.methods.setdefault(method, MethodUse())

    @property
    def speedup(self) -> float | None:
        """Time that plain decoding would have taken for the same tokens, by the cost table, over the time taken."""
        return self.plain_seconds / self.seconds if self.seconds > 0 else None

    def line(self) -> str:
        """For people: what was used most comes first."""
        used = sorted(self.methods.items(), key=lambda item: -item[1].num_drafts)
        parts = [
            f"{name}, K {use.mean_length:.0f}: {use.acceptance_rate:.2f} accepted"
            for name, use in used
            if use.num_drafts
        ]
        line = "; ".join(parts) or "nothing drafted"
        if parts and self.speedup is not None:
            line += f", {self.speedup:.1f}×"
        if not self.num_choices:
            return line
        num_off = sum(self.off.values())
        if num_off * 10 >= self.num_choices:
            (running, reason), _ = self.off.most_common(1)[0]
            requests = "1 running request" if running == 1 else f"{running} running requests"
            line += f"; off at {requests}: {reason}" if parts else f": {reason}"
        return line

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": self.line(),
            "num_choices": self.num_choices,
            "num_probes": self.num_probes,
            "predicted_speedup": self.speedup,
            "left_out": dict(self.left_out),
            "methods": {
                name: {
                    "num_drafts": use.num_drafts,
                    "num_draft_tokens": use.num_draft_tokens,
                    "num_accepted_tokens": use.num_accepted_tokens,
                    "acceptance_rate": use.acceptance_rate,
                    "mean_draft_tokens": use.mean_length,
                }
                for name, use in self.methods.items()
            },
            "off": [
                {"running": running, "reason": reason, "num_choices": count}
                for (running, reason), count in self.off.most_common()
            ],
        }
