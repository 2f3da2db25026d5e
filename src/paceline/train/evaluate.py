"""How good a drafter in training is: what decoding with it accepts, and what its guesses on that very text promise.

The two come from code that shares nothing but the weights: the engine's cached passes there, the trainer's forward over
whole texts here. Where they differ, one of them is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.outputs import RequestOutput
from paceline.engine.statistics import SpeculationStatistics
from paceline.models.load import LoadedModel, load_model
from paceline.train.batch import Batch, target_states
from paceline.train.dataset import Sample
from paceline.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy answers to `prompts` (token ids) of at most `max_tokens`, drafted in chains of `num_draft_tokens`."""

    model: LoadedModel
    recipe: Recipe
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int = 64
    num_draft_tokens: int = 4

    def __call__(self, checkpoint: Path) -> dict[str, Any]:
        outputs = self.decode(checkpoint)
        total = SpeculationStatistics()
        for output in outputs:
            total.merge(output.outputs[0].speculation)
        simulated = [self.simulate(output) for output in outputs]
        passes = sum(len(lengths) for lengths in simulated)
        return {
            "decoded_acceptance_length": round(total.mean_acceptance_length, 4),
            "simulated_acceptance_length": round(sum(map(sum, simulated)) / max(1, passes), 4),
            "decoded_tokens": total.num_tokens,
            "acceptance_by_position": [round(r, 4) for r in total.acceptance_by_position(self.num_draft_tokens)],
        }

    def decode(self, checkpoint: Path) -> list[RequestOutput]:
        """By the engine, with the drafter as it was written, and for the target that it is for."""
        speculation = {
            "method": self.recipe.method,
            "model": str(checkpoint),
            "num_speculative_tokens": self.num_draft_tokens,
            **self.recipe.drafting,
        }
        llm = LLM(self.target(checkpoint), speculation, max_num_seqs=8)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in self.prompts]
        return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=self.max_tokens))

    def target(self, checkpoint: Path) -> LoadedModel:
        """The target of a drafter that was written: the one it was trained on, or its own."""
        if self.recipe.own_target is None:
            return self.model
        return load_model(str(checkpoint / self.recipe.own_target), device=str(self.model.decoder.device), packed=False)

    def simulate(self, output: RequestOutput) -> list[int]:
        """Tokens of each pass, had the answer been drafted by the trainer's own guesses."""
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        sample = Sample("", prompt + answer, ((len(prompt), len(prompt) + len(answer)),))
        states = target_states(self.model.decoder, [sample], self.recipe.layers)
        guesses = self.recipe.guesses(Batch.of([sample], states), self.num_draft_tokens)
        return pass_lengths(guesses, prompt, answer)


def pass_lengths(guesses: torch.Tensor, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Walk an answer as greedy decoding does: guesses [K, T] are right as long as they are the text's own tokens.

    guesses[i, t] is of token t + 2 + i. The first draft is made behind the prompt's last token but one.
    """
    text = [*prompt, *answer]
    lengths: list[int] = []
    done = len(prompt)  # tokens that are settled: the next pass drafts number `done` and on
    while done < len(text):
        left = len(text) - done
        right = 0
        row = done - 2
        while row >= 0 and right < min(len(guesses), left - 1) and int(guesses[right, row]) == text[done + right]:
            right += 1
        lengths.append(right + 1)
        done += right + 1
    return lengths
