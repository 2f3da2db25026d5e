"""`paceline tune tree`: measured positional acceptance of a head's drafts, and the best static tree for it.

The answer is decoded plainly first, then drafted along: at every depth it is noted which of the drafted siblings the
answer's token is, and drafting goes on under that one, whatever its rank. So one chain measures what would take a full
tree of `width` to the power of the depth. Source: Chen et al., Sequoia, 2402.12374, §4.1.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.cli.loading import require_tokenizer
from paceline.cli.tuning import Log, encode, read_prompts
from paceline.core.drafting import DraftSampler, Draw
from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.core.tree_shapes import StaticTree, optimal_tree
from paceline.decode import decode
from paceline.drafters.base import Drafter, SequenceView, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.none import NoDrafter
from paceline.drafters.registry import METHODS, OF_METHODS
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.load import load_model

TREE_METHODS = tuple(
    name for name, method in METHODS.items() if "speculative_token_tree" in method.options and name not in OF_METHODS
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of one prompt's answer, a list a draft: the rank of the answer's token at each depth, to the first miss (−1)."""

    prompt: int
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Ranks":
        return cls(values["prompt"], tuple(tuple(draft) for draft in values["ranks"]))


@dataclass(frozen=True, slots=True)
class Along:
    """A sampler that notes at which rank of `width` siblings the answer's token would be drawn, and draws it."""

    inner: DraftSampler
    answer: Sequence[int]  # from the next token on
    width: int
    noted: list[int]
    prunable: ClassVar[bool] = True

    def draw(self, logits: torch.Tensor, k: int = 1) -> Draw:
        if not self.answer:
            return Draw(())
        drawn = self.inner.draw(logits, self.width).tokens
        if -1 not in self.noted:
            self.noted.append(drawn.index(self.answer[0]) if self.answer[0] in drawn else -1)
        return Draw((self.answer[0],))

    def scored(self, logits: torch.Tensor, k: int) -> Draw:
        return self.draw(logits, k)

    def advance(self, *tokens: int) -> "Along":
        return Along(self.inner.advance(*tokens), self.answer[len(tokens) :], self.width, self.noted)


class _View:
    """A request whose drafts go along its answer."""

    def __init__(self, inner: SequenceView, sampler: Along) -> None:
        self._inner, self.draft_sampler = inner, sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Measuring:
    """A drafter, made to draft along `text`: prompt and answer. `ranks`: a list a draft."""

    def __init__(self, inner: Drafter, text: Sequence[int], width: int) -> None:
        self.name, self.needs = inner.name, inner.needs
        self.ranks: list[tuple[int, ...]] = []
        self._inner, self._text, self._width = inner, text, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        views: list[Any] = []
        noted: list[list[int]] = [[] for _ in sequences]
        for sequence, own in zip(sequences, noted, strict=True):
            rest = self._text[len(sequence.token_ids) :]
            views.append(_View(sequence, Along(sequence.draft_sampler, rest, self._width, own)))
        proposals = self._inner.propose(views, budgets)
        self.ranks.extend(tuple(own) for own in noted if own)
        return proposals


def measure(target: Decoder, drafter: Drafter, number: int, prompt: Sequence[int], args: argparse.Namespace) -> Ranks:
    """One prompt's: greedily decoded, then drafted along."""
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    answer = [token for step in decode(target, prompt, params, NoDrafter(), 0) for token in step.token_ids]
    measuring: Any = Measuring(drafter, [*prompt, *answer], args.width)
    for _ in decode(target, prompt, params, measuring, args.depth):
        pass
    return Ranks(number, tuple(measuring.ranks))


def acceptance(drafts: Sequence[Sequence[int]], depth: int, width: int) -> list[list[float]]:
    """[depth][rank]: how often the child of that rank was right under a node that was."""
    rows = []
    for level in range(depth):
        there = [draft[level] for draft in drafts if len(draft) > level]
        if not there:
            break
        rows.append([there.count(rank) / len(there) for rank in range(width)])
    return rows


def tune(args: argparse.Namespace) -> int:
    if args.method not in TREE_METHODS:
        raise PacelineError(
            f"--method {args.method} drafts no tree of a given shape", hint=f"one of: {', '.join(TREE_METHODS)}"
        )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompts = read_prompts(Path(args.prompts), args.num_prompts)
    model = load_model(args.model, dtype=args.dtype)
    tokenizer = require_tokenizer(model)
    depth = {"num_speculative_tokens": args.depth}
    common = {"method": args.method, "model": args.head}
    chain = SpeculativeConfig.from_dict({**common, **depth, "speculative_token_tree": "chain"})
    drafter = create_drafter(chain, model)
    about = {
        **common,
        "target": model.name,
        "precision": model.precision,
        "prompts": hashlib.sha256(json.dumps([prompts, args.raw]).encode()).hexdigest()[:16],
        "max_tokens": args.max_tokens,
        "depth": args.depth,
        "width": args.width,
    }
    log = Log(Path(args.log), about, Ranks.parse)
    for number in range(len(log.trials), len(prompts)):
        ids = encode(tokenizer, prompts[number], args.raw)
        log.keep(measure(model.decoder, drafter, number, ids, args))
        print(f"prompt {number + 1} of {len(prompts)}: {len(log.trials[-1].ranks)} drafts", file=sys.stderr, flush=True)
    drafts = [draft for one in log.trials for draft in one.ranks]
    rows = acceptance(drafts, args.depth, args.width)
    if not rows:
        raise PacelineError("every answer ends with its first token: nothing can be measured", hint="other prompts")
    tree = optimal_tree(rows, args.num_draft_tokens)
    report(rows, tree)
    paths = [list(path) for path in tree.paths]
    print(json.dumps({**common, "speculative_token_tree": paths, "num_speculative_tokens": len(paths)}))
    return 0


def report(rows: Sequence[Sequence[float]], tree: StaticTree) -> None:
    for depth, row in enumerate(rows, 1):
        shares = " ".join(f"{share:.2f}" for share in row)
        print(f"depth {depth}: accepted by rank {shares}", file=sys.stderr)
    print(f"the best {len(tree.paths)} nodes are {tree.depth} deep: {expected(rows, tree):.2f} tokens a pass expected"
          f", a chain of as many {expected(rows, StaticTree.chain(len(tree.paths))):.2f}", file=sys.stderr)  # fmt: skip


def expected(rows: Sequence[Sequence[float]], tree: StaticTree) -> float:
    """Tokens a pass, the target's own included: 1 and every node's chance of being accepted."""
    total = 1.0
    for path in tree.within(len(rows)).paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= rows[depth][rank]
        total += chance
    return total
