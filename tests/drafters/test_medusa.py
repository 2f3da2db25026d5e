"""Medusa: every published format gives the reference's logits; trees, states and refusals."""

from pathlib import Path

import pytest
import tiny
import torch
from drafters.drafting_by_hand import OUTPUT, TARGET, Request, features, hidden_states
from drafters.head_files import Medusa, medusa, write

from paceline.core.tree_shapes import MEDUSA_TREE, StaticTree
from paceline.drafters.base import Features
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.medusa import MedusaDrafter, create
from paceline.errors import PacelineError
from paceline.models.head_checkpoint import load_medusa

VLLM = "model.safetensors"
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
    "another vocabulary, larger": (
        medusa(torch.zeros(2000, 64), "original"),
        "the heads' output layer is of 2000 tokens, the target's vocabulary has 256",
    ),
    "another vocabulary, of the config": (
        Medusa({**FORMATS["vLLM"].config, "vocab_size": 900}, FORMATS["vLLM"].tensors, FORMATS["vLLM"].logits, VLLM),
        "vocab_size is of 900 tokens, the target's vocabulary has 256",
    ),
    "a map of another output layer": (
        changed(FORMATS["vLLM, reduced vocabulary"], **{"lm_heads.1.weight": torch.zeros(50, 64)}),
        "token_map names 60 of the target's 256 tokens, a head's output layer has 50 rows",
    ),
    "a map without output layers": (
        changed(FORMATS["type B, .safetensors"], token_map=torch.arange(60)),
        "token_map names 60 of the target's 256 tokens, a head's output layer has 0 rows",
    ),
    "an output layer without a head": (
        changed(FORMATS["type A, .pt"], **{"4.1.weight": torch.zeros(256, 64)}),
        "head 4 of 5 lacks its blocks or its output layer",
    ),
    "two output layers": (
        changed(FORMATS["type A, .pt"], **{"1.2.weight": torch.zeros(256, 64)}),
        "1.2.weight is a second output layer of head 1",
    ),
    "a bias without a weight": (
        changed(FORMATS["type A, three blocks"], **{"1.1.linear.weight": None}),
        "head 1 lacks the weight of its block 1",
    ),
    "a block missing": (
        changed(FORMATS["type A, three blocks"], **{"1.0.linear.weight": None, "1.0.linear.bias": None}),
        "head 1 lacks the weight of its block 0",
    ),
    "a lone number": (
        changed(FORMATS["vLLM"], **{"blocks.0.layers.0.weight": torch.tensor(1.0)}),
        "blocks.0.layers.0.weight is 0, the target's hidden size is 64",
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
    assert "\n" not in str(error.value)


def test_output_layers_of_their_own_go_before_a_shared_one(tmp_path: Path) -> None:
    """vLLM reads `lm_head` where its config says original_lm_head, or where there is nothing else."""
    own, shared = FORMATS["vLLM"], torch.zeros(256, 64)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).double()
    both = changed(own, **{"lm_head.weight": shared})
    heads = load_medusa(str(both.write(tmp_path / "own")), TARGET)
    torch.testing.assert_close(heads.logits(1, hidden)[0], own.logits(hidden[0])[1], rtol=1e-5, atol=1e-5)
    both.config = {**both.config, "original_lm_head": True}
    heads = load_medusa(str(both.write(tmp_path / "shared")), TARGET)
    assert not heads.logits(1, hidden).any()


def test_a_tree_of_ones_own_must_have_heads_enough(tmp_path: Path) -> None:
    path = str(FORMATS["vLLM"].write(tmp_path))  # four heads

    class Target:
        decoder = TARGET

    for tree in ([[0], [0, 0], [1]], "static", "chain", "dynamic"):
        config = SpeculativeConfig("medusa", model=path, speculative_token_tree=tree)  # type: ignore[arg-type]
        create(config, Target())  # type: ignore[arg-type]
    deep = [[0] * depth for depth in range(1, 6)]
    config = SpeculativeConfig.from_dict({"method": "medusa", "model": path, "speculative_token_tree": deep})
    with pytest.raises(PacelineError, match=r"has paths of more tokens than .* has heads, 4"):
        create(config, Target())  # type: ignore[arg-type]


def test_pickles_that_could_run_code_are_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, {}, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path("a")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(PacelineError, match="holds more than tensors"):
        load_medusa(str(tmp_path), TARGET)


def test_the_published_tree() -> None:
    assert (len(MEDUSA_TREE.paths), MEDUSA_TREE.depth) == (63, 4)
    assert MEDUSA_TREE.widths()[()] == 10
