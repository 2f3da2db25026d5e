"""What was measured, kept for the next start: costs, acceptance and lengths, for one model, drafters and machine.

A profile that is damaged, of another version, or of something else is as good as none.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.engine.acceptance import FULL_LENGTH, PositionRates
from paceline.engine.costs import CostTable
from paceline.models.decoder import Decoder
from paceline.models.home import home, write_json
from paceline.models.probe import ARITHMETIC_VERSION, device_name

VERSION = 2


@dataclass(frozen=True, slots=True)
class Profile:
    """What one file holds."""

    costs: CostTable
    acceptance: PositionRates
    lengths: PositionRates


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """The file of one set of facts."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def of(cls, target: Decoder, drafters: str) -> "ProfileStore":
        """For a target on this machine, and drafters that `drafters` describes."""
        shape = replace(target.config, max_context=0, bos_token_id=None, eos_token_ids=())
        facts = {
            "version": VERSION,
            "arithmetic": ARITHMETIC_VERSION,
            "config": hashlib.sha256(shape.to_json().encode()).hexdigest(),
            "dtype": str(target.dtype),
            "products": [linear.arithmetic for linear in target.linears()],
            "device": device_name(target.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "drafters": drafters,
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        return cls(home() / "profiles" / f"{name}.json", facts)

    def load(self) -> Profile | None:
        """None if there is none that can be believed."""
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
            if value["facts"] != self.facts:
                return None
            return Profile(
                CostTable.from_json(value["costs"]),
                PositionRates.from_json(value["acceptance"]),
                PositionRates.from_json(value["lengths"], FULL_LENGTH),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def save(self, profile: Profile) -> None:
        """A full or read-only disk costs the next start a measurement, no more."""
        value = {
            "facts": self.facts,
            "costs": profile.costs.to_json(),
            "acceptance": profile.acceptance.to_json(),
            "lengths": profile.lengths.to_json(),
        }
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, value)
