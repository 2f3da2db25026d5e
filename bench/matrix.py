"""Cells of the identity matrix: one prompt, one set of parameters, one drafter, one K, against plain decoding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.params import SamplingParams
from paceline.decode import Step, decode
from paceline.drafters.base import Drafter
from paceline.drafters.none import NoDrafter
from paceline.models.decoder import Decoder

PARAMS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=20_260, ignore_eos=True),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What one cell found. `accepted_at[i]`, `rejected_at[i]`: how often draft position i was kept, or failed first.

    Several drafters may be of one method: a good draft model and a bad one, say.
    """

    prompt: int
    prompt_tokens: int
    params: str
    method: str
    drafter: str
    k: int
    tokens: int
    identical: bool
    first_difference: int | None
    drafted: int
    accepted: int
    passes: int
    accepted_at: tuple[int, ...]
    rejected_at: tuple[int, ...]

    @property
    def key(self) -> tuple[int, str, str, int]:
        return (self.prompt, self.params, self.drafter, self.k)


def plain_tokens(target: Decoder, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Plain decoding, one row at a time, the prompt included."""
    steps = decode(target, prompt, params, NoDrafter(), 0, prefill_rows=1)
    return [token for step in steps for token in step.token_ids]


def run_cell(
    target: Decoder,
    drafter: Drafter,
    drafter_name: str,
    prompt_number: int,
    prompt: Sequence[int],
    params_name: str,
    k: int,
    expected: Sequence[int],
) -> Cell:
    params = replace(PARAMS[params_name], max_tokens=len(expected))
    steps = list(decode(target, prompt, params, drafter, k))
    got = [token for step in steps for token in step.token_ids]
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    accepted_at, rejected_at = _by_position(steps, k)
    return Cell(
        prompt=prompt_number,
        prompt_tokens=len(prompt),
        params=params_name,
        method=drafter.name,
        drafter=drafter_name,
        k=k,
        tokens=len(expected),
        identical=not different,
        first_difference=different[0] if different else None,
        drafted=sum(step.num_draft_tokens for step in steps),
        accepted=sum(step.num_accepted_tokens for step in steps),
        passes=len(steps),
        accepted_at=accepted_at,
        rejected_at=rejected_at,
    )


def _by_position(steps: Sequence[Step], k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    accepted, rejected = [0] * k, [0] * k
    for step in steps:
        for position in range(step.num_accepted_tokens):
            accepted[position] += 1
        # a run cut at its end was not rejected: its last token would be the bonus
        if step.finish_reason is None and step.num_accepted_tokens < step.num_draft_tokens:
            rejected[step.num_accepted_tokens] += 1
    return tuple(accepted), tuple(rejected)


def run_matrix(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, Callable[[], Drafter]],
    ks: Sequence[int],
    num_tokens: int,
    skip: set[tuple[int, str, str, int]],
) -> Iterator[Cell]:
    """Every cell whose key is not in `skip`; a prompt's plain tokens are worked out once for each set of parameters."""
    for number, prompt in enumerate(prompts):
        for params_name, params in PARAMS.items():
            todo = [(name, k) for name in drafters for k in ks if (number, params_name, name, k) not in skip]
            if not todo:
                continue
            expected = plain_tokens(target, prompt, replace(params, max_tokens=num_tokens))
            for name, k in todo:
                yield run_cell(target, drafters[name](), name, number, prompt, params_name, k, expected)


def uncovered_positions(cells: Sequence[Cell]) -> list[str]:
    """Draft positions at which a method was never accepted, or never rejected, over all cells and drafters of its K."""
    missing = []
    for method, k in sorted({(cell.method, cell.k) for cell in cells}):
        group = [cell for cell in cells if (cell.method, cell.k) == (method, k)]
        for position in range(k):
            if not sum(cell.accepted_at[position] for cell in group):
                missing.append(f"{method}, K {k}: position {position + 1} was never accepted")
            if not sum(cell.rejected_at[position] for cell in group):
                missing.append(f"{method}, K {k}: position {position + 1} was never rejected")
    return missing
