"""Medusa: every published format gives the reference's logits; trees, states and refusals."""

from pathlib import Path

import pytest
import tiny
import torch
from drafters.drafting_by_hand import OUTPUT, TARGET, Request, features, hidden_states
from drafters.head_files import Medusa, medusa, write

from paceline.core.tree_shapes import MEDUSA_TREE, StaticTree
from paceline.drafters.base import Features
from paceline.drafters.medusa import MedusaDrafter
from paceline.errors import PacelineError
from paceline.models.head_checkpoint import load_medusa

FORMATS = {
    "type A, .pt": medusa(OUTPUT, "original"),
    "type A, three blocks": medusa(OUTPUT, "original", heads=3, blocks=3),
    "type B, .safetensors": medusa(OUTPUT, "original", own_output=False),
    "vLLM": medusa(OUTPUT, "vllm"),
    "vLLM, reduced vocabulary": medusa(OUTPUT, "vllm", reduced=60),
}


@pytest.mark.parametrize("head", FORMATS.values(), ids=FORMATS)
def test_draft_logits_are_the_references(head: Medusa, tmp_path: Path) -> None:
    """After the prompt, after partial and after full acceptance."""
    heads = load_medusa(str(head.write(tmp_path)), TARGET)
    drafter = MedusaDrafter(heads, StaticTree.of([[0], [0, 0], [1], [0, 0, 0], [1, 0]]))
    request = Request(tiny.prompt(20))
    observed = 0
    for accepted in (0, 1, 3, 2):
        text = request.token_ids
        drafter.observe(request, text[observed:-1], features(text, (-1,), observed, len(text) - 1))
        observed = len(text) - 1
        (proposal,) = drafter.propose([request], [5])
        assert proposal.parents[:2] == (-1, -1) and len(proposal) == 5
        state = hidden_states(text[:-1], (-1,))[-1][-1]
        for path, logits in request.noted.items():
            torch.testing.assert_close(logits, head.logits(state)[len(path)], rtol=1e-5, atol=1e-5)
        assert {len(path) for path in request.noted} == {0, 1, 2}
        drafted = [proposal.tokens[0], *proposal.path_tokens(len(proposal) - 1)[1:]][:accepted]
        request.token_ids = [*text, *drafted, (11 * len(text)) % 256]


def test_a_batch_is_drafted_as_each_request_alone(tmp_path: Path) -> None:
    heads = load_medusa(str(FORMATS["type A, .pt"].write(tmp_path)), TARGET)
    requests = [Request(tiny.prompt(n, seed=n), n) for n in (2, 9, 30)]
    budgets = [63, 0, 7]
    drafters = [MedusaDrafter(heads), MedusaDrafter(heads)]
    for drafter in drafters:
        for request in requests:
            text = request.token_ids
            drafter.observe(request, text[:-1], features(text, (-1,), 0, len(text) - 1))
    together = drafters[0].propose(requests, budgets)
    assert [len(proposal) for proposal in together] == [63, 0, 7]
    assert together == [drafters[1].propose([r], [b])[0] for r, b in zip(requests, budgets, strict=True)]
    assert max(together[0].children(-1)) == 9  # ten children of the root


def test_what_it_does_not_know_it_does_not_draft(tmp_path: Path) -> None:
    """Nothing observed, a gap, a snapshot of another length: empty drafts until the next token is observed."""
    drafter = MedusaDrafter(load_medusa(str(FORMATS["vLLM"].write(tmp_path)), TARGET))
    request, child = Request(tiny.prompt(20)), Request(tiny.prompt(20), 1)
    text = request.token_ids
    assert len(drafter.propose([request], [4])[0]) == 0
    drafter.observe(request, text[:-1], features(text, (-1,), 0, 19))
    expected = drafter.propose([request], [4])
    drafter.fork(request, child)
    assert drafter.propose([child], [4]) == expected
    snapshot = drafter.snapshot(request)
    drafter.release(child)
    drafter.restore(child, snapshot, 19)
    assert drafter.propose([child], [4]) == expected
    drafter.restore(child, snapshot, 10)
    assert len(drafter.propose([child], [4])[0]) == 0
    drafter.observe(child, text[10:-1], features(text, (-1,), 10, 19))
    assert drafter.propose([child], [4]) == expected
    drafter.observe(request, text[-1:], Features({-1: torch.zeros(1, 64).double()}))
    assert len(drafter.propose([request], [4])[0]) == 0  # the text is behind
    for sequence in (request, child):
        drafter.release(sequence)
    drafter.discard(snapshot)
    assert not drafter._seen


def changed(head: Medusa, **tensors: torch.Tensor | None) -> Medusa:
    kept = {name: t for name, t in {**head.tensors, **tensors}.items() if t is not None}
    return Medusa(head.config, kept, head.logits, head.file)


REFUSALS = {
    "another hidden size": (medusa(torch.zeros(256, 32), "original"), "is 32, the target's hidden size is 64"),
    "a smaller vocabulary": (
        medusa(torch.zeros(200, 64), "original"),
        "the heads' output layer has 200 rows, the target 256 tokens, and there is no token_map",
    ),
    "a token that the target lacks": (
        medusa(torch.zeros(300, 64), "vllm", reduced=299),
        "the target's vocabulary has 256 tokens",
    ),
    "an output layer missing": (
        changed(FORMATS["type A, .pt"], **{"2.1.weight": None}),
        "head 2 of 4 lacks its blocks or its output layer",
    ),
    "a tensor that nobody uses": (
        changed(FORMATS["vLLM"], surplus=torch.zeros(3)),
        "tensor surplus has no place in Medusa heads",
    ),
}


@pytest.mark.parametrize(("head", "message"), REFUSALS.values(), ids=REFUSALS)
def test_heads_that_do_not_fit_are_refused(head: Medusa, message: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as error:
        load_medusa(str(head.write(tmp_path)), TARGET)
    assert message in str(error.value)


def test_pickles_that_could_run_code_are_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, {}, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path("a")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(PacelineError, match="holds more than tensors"):
        load_medusa(str(tmp_path), TARGET)


def test_the_published_tree() -> None:
    assert (len(MEDUSA_TREE.paths), MEDUSA_TREE.depth) == (63, 4)
    assert MEDUSA_TREE.widths()[()] == 10
