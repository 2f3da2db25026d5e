"""EAGLE-1/2 and EAGLE-3: every published format gives the reference's logits, whatever was accepted; refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from drafters.drafting_by_hand import EMBED, NUM_LAYERS, OUTPUT, TARGET, Request, features, hidden_states
from drafters.head_files import (
    Head,
    eagle,
    eagle3_native,
    eagle3_specforge,
    eagle3_speculators,
    medusa,
)

from paceline.core.tree_shapes import EAGLE_TREE, DynamicTree, StaticTree, TreeShape
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.eagle import EagleDrafter, FeatureRows, _tree
from paceline.errors import PacelineError
from paceline.models.cache import CacheFull
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.heads import FeatureHead


def wrapped(head: Head) -> Head:
    return replace(head, config={"model_type": "eagle", "architectures": ["EAGLEModel"], "model": head.config})


def natively(head: Head) -> Head:
    """A head of speculators' format, its config as EAGLE's own with EAGLE-3.1's flags."""
    flat = head.config["transformer_layer_config"]
    assert isinstance(flat, dict)
    own = {key: value for key, value in head.config.items() if "speculators" not in key and key != "auto_map"}
    return replace(head, config={**flat, **own, "architectures": ["LlamaForCausalLMEagle3"]})


FORMATS = {
    "EAGLE-1": ("eagle", eagle(EMBED, OUTPUT)),
    "EAGLE-1 with bias": ("eagle", eagle(EMBED, OUTPUT, bias=True)),
    "EAGLE-1 of Qwen 2": ("eagle", eagle(EMBED, OUTPUT, qwen2=True)),
    "EAGLE-1, wrapped by vLLM": ("eagle", wrapped(eagle(EMBED, OUTPUT))),
    "EAGLE-3": ("eagle3", eagle3_native(EMBED, NUM_LAYERS)),
    "EAGLE-3, whole vocabulary": ("eagle3", eagle3_native(EMBED, NUM_LAYERS, draft_vocab=None)),
    "SpecForge": ("eagle3", eagle3_specforge(EMBED)),
    "speculators": ("eagle3", eagle3_speculators(EMBED)),
    "speculators, residual": ("eagle3", eagle3_speculators(EMBED, norm_before_residual=True)),
    "speculators, norm before fc": ("eagle3", eagle3_speculators(EMBED, norm_before_fc=True)),
    "speculators, Qwen 3": ("eagle3", eagle3_speculators(EMBED, qwen3=True)),
    "EAGLE-3.1": ("eagle3", eagle3_speculators(EMBED, fc_norm=True, norm_output=True)),
    "states fed back normed": ("eagle3", natively(eagle3_speculators(EMBED, size=64, norm_output=True))),
}
TREES: dict[str, TreeShape] = {
    "chain": StaticTree.chain(4),
    "static": EAGLE_TREE,
    "dynamic": DynamicTree(top_k=4, depth=4),
}


def load(kind: str, head: Head, folder: Path) -> FeatureHead:
    path = str(head.write(folder))
    return load_eagle(path, TARGET) if kind == "eagle" else load_eagle3(path, TARGET)


class Following:
    """A request whose text is decided here, and a drafter that is told of it."""

    def __init__(self, drafter: EagleDrafter, prompt: list[int], number: int = 0) -> None:
        self.drafter = drafter
        self.request = Request(prompt, number)
        self.observed = 0

    def observe(self, upto: int | None = None) -> None:
        text, layers = self.request.token_ids, self.drafter.needs.hidden_layers
        stop = len(text) - 1 if upto is None else upto
        self.drafter.observe(self.request, text[self.observed : stop], features(text, layers, self.observed, stop))
        self.observed = stop

    def check(self, head: Head, budget: int, paths: int = 6) -> list[int]:
        """Draft, compare (some of) the logits shown with the reference's, and return a drafted path."""
        (proposal,) = self.drafter.propose([self.request], [budget])
        assert 0 < len(proposal) <= budget
        assert proposal.is_chain or self.drafter.needs.trees
        hidden = hidden_states(self.request.token_ids[:-1], head.layers)
        noted = self.request.noted
        for path in [*sorted(noted, key=lambda path: (-len(path), path))[:paths], ()]:
            expected = head.reference.after(self.request.token_ids, hidden, list(path))
            # norms are taken in float32; an EAGLE-1 head's states grow from level to level
            size = float(expected[expected.isfinite()].abs().max())
            torch.testing.assert_close(noted[path] / size, expected / size, rtol=0, atol=2e-5)
        deepest = max(range(len(proposal)), key=lambda node: len(proposal.path_tokens(node)))
        return list(proposal.path_tokens(deepest))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("kind", FORMATS)
def test_draft_logits_are_the_references(kind: str, tree: TreeShape, tmp_path: Path) -> None:
    """After the prompt, after none, part and all of a draft was accepted, and after steps without speculation."""
    method, head = FORMATS[kind]
    drafter = EagleDrafter(method, load(method, head, tmp_path), tree)
    assert drafter.needs.hidden_layers == head.layers
    following = Following(drafter, tiny.prompt(70))
    following.observe(64)  # the prompt comes in two chunks
    for round_, accepted in enumerate((1, 4, 0, 4)):
        following.observe()
        drafted = following.check(head, 20)
        text = following.request.token_ids
        following.request.token_ids = [*text, *drafted[:accepted], (7 * len(text)) % 256]
        if round_ == 2:
            for token in (5, 6, 7):
                following.observe()
                following.request.token_ids = [*following.request.token_ids, token]
    following.observe()
    following.check(head, 20)
    drafter.release(following.request)
    assert drafter.pool.blocks_in_use == 0 and not drafter._states


def test_a_long_text_is_caught_up_with(tmp_path: Path) -> None:
    method, head = FORMATS["EAGLE-3"]
    drafter = EagleDrafter(method, load(method, head, tmp_path), TREES["chain"])
    following = Following(drafter, tiny.prompt(300))
    for upto in (50, 178, 299):
        following.observe(upto)
    following.check(head, 3)
    following.check(head, 3)  # asked again, it answers the same


@pytest.mark.parametrize("length", [2, 58, 63, 64, 65, 126])
def test_a_tree_across_the_end_of_a_block_is_drafted_rightly(length: int, tmp_path: Path) -> None:
    method, head = FORMATS["EAGLE-3"]
    drafter = EagleDrafter(method, load(method, head, tmp_path), DynamicTree(top_k=5, depth=4))
    following = Following(drafter, tiny.prompt(length))
    following.observe()
    following.check(head, 30, paths=12)


def test_a_batch_is_drafted_as_each_request_alone(tmp_path: Path) -> None:
    method, head = FORMATS["speculators"]
    loaded = load(method, head, tmp_path)
    drafters = [EagleDrafter(method, loaded, TREES["dynamic"]) for _ in range(2)]
    following = [[Following(d, tiny.prompt(n, seed=n), n) for n in (2, 30, 130)] for d in drafters]
    for each in (*following[0], *following[1]):
        each.observe()
    budgets = [12, 0, 5]
    together = drafters[0].propose([f.request for f in following[0]], budgets)
    alone = [drafters[1].propose([f.request], [b])[0] for f, b in zip(following[1], budgets, strict=True)]
    assert together == alone
    assert [len(proposal) for proposal in together] == budgets


@pytest.mark.parametrize("length", [0, 1, 63, 64, 80, 99])
def test_snapshots_and_forks_go_on_from_any_length(length: int, tmp_path: Path) -> None:
    method, head = FORMATS["EAGLE-3"]
    drafter = EagleDrafter(method, load(method, head, tmp_path), TREES["static"])
    first = Following(drafter, tiny.prompt(100))
    first.observe()
    first.check(head, 8)
    snapshot = drafter.snapshot(first.request)
    other = Following(drafter, [*tiny.prompt(100)[:length], 5, 6, 7], 1)
    drafter.restore(other.request, snapshot, length)
    other.observed = length
    other.observe()
    other.check(head, 8)
    child = Following(drafter, first.request.token_ids, 2)
    drafter.fork(first.request, child.request)
    child.check(head, 8)
    first.check(head, 8)
    for sequence in (first, other, child):
        drafter.release(sequence.request)
    drafter.discard(snapshot)
    assert drafter.pool.blocks_in_use == 0


def test_without_the_features_of_a_part_it_does_not_draft(tmp_path: Path) -> None:
    method, head = FORMATS["EAGLE-1"]
    drafter = EagleDrafter(method, load(method, head, tmp_path), TREES["chain"])
    following = Following(drafter, tiny.prompt(20))
    assert len(drafter.propose([following.request], [4])[0]) == 0
    following.observe(10)
    assert len(drafter.propose([following.request], [4])[0]) == 0
    drafter.restore(following.request, None, 10)
    following.observe()
    assert len(drafter.propose([following.request], [4])[0]) == 0
    drafter.restore(following.request, None, 0)  # put back: it is observed from its start again
    following.observed = 0
    following.observe()
    following.check(head, 4)


def test_feature_rows() -> None:
    rows, table = FeatureRows(), torch.arange(300.0)[:, None]
    for start, stop in ((0, 1), (1, 64), (64, 65), (65, 200), (200, 256), (256, 300)):
        rows.append(table[start:stop])
        assert rows.length == stop
        assert torch.equal(rows.rows(0, stop), table[:stop])
    copies = [rows.copy(length) for length in (0, 1, 64, 100, 300)]
    rows.append(torch.zeros(3, 1))
    for copy in copies:
        held = copy.length
        copy.append(-table[:70])
        expected = torch.cat((table[:held], -table[:70]))
        assert torch.equal(copy.rows(0, held + 70), expected)
        assert torch.equal(copy.rows(held // 2, held + 9), expected[held // 2 : held + 9])
    assert torch.equal(rows.rows(290, 303), torch.cat((table[290:], torch.zeros(3, 1))))


def edited(head: Head, config: dict[str, object] | None = None, **tensors: torch.Tensor | None) -> Head:
    kept = {name: t for name, t in {**head.tensors, **tensors}.items() if t is not None}
    return replace(head, config={k: v for k, v in {**head.config, **(config or {})}.items() if v != ...}, tensors=kept)


NATIVE, SPECULATORS, EAGLE1 = (FORMATS[name][1] for name in ("EAGLE-3", "speculators", "EAGLE-1"))
REFUSALS = {
    "EAGLE-1 as EAGLE-3": ("eagle3", EAGLE1, "method 'eagle3' needs an EAGLE-3 head, and", "holds an EAGLE-1/2 head"),
    "EAGLE-3 as EAGLE-1": ("eagle", NATIVE, "method 'eagle' needs an EAGLE-1/2 head, and", "holds an EAGLE-3 head"),
    "Medusa as EAGLE-3": ("eagle3", medusa(OUTPUT, "vllm"), "needs an EAGLE-3 head, and", "holds Medusa heads"),
    "no d2t": (
        "eagle3",
        edited(NATIVE, d2t=None, t2d=None),
        "lm_head.weight has 100 rows, the target 256 tokens, and there is no d2t",
    ),
    "d2t beyond the target": (
        "eagle3",
        edited(NATIVE, d2t=NATIVE.tensors["d2t"] + 200, t2d=None),
        "d2t leads to token",
        "the target's vocabulary has 256 tokens",
    ),
    "d2t of no ids": (
        "eagle3",
        edited(NATIVE, d2t=NATIVE.tensors["d2t"].float(), t2d=None),
        "d2t holds torch.float32, no token ids",
    ),
    "d2t and t2d disagree": ("eagle3", edited(NATIVE, t2d=NATIVE.tensors["t2d"].roll(1)), "name different target"),
    "another target's hidden size": (
        "eagle3",
        eagle3_native(torch.zeros(256, 32), NUM_LAYERS),
        "fc.weight reads 96 values, 3 hidden states of the target make 3 × 64",
    ),
    "target_hidden_size": (
        "eagle3",
        edited(SPECULATORS, {"target_hidden_size": 128}),
        "target_hidden_size is 128, the target's hidden size is 64",
    ),
    "EAGLE-1's hidden size": (
        "eagle",
        eagle(torch.zeros(256, 32), OUTPUT),
        "hidden_size is 32, the target's hidden size is 64",
    ),
    "a layer that the target lacks": (
        "eagle3",
        edited(SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [1, 5, 30]}),
        "reads the output of layer 29, the target has layers 0 to 7",
    ),
    "the embeddings as a layer": (
        "eagle3",
        edited(SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [0, 5, 6]}),
        "reads the output of layer -1",
    ),
    "an unwritten default": (
        "eagle3",
        edited(SPECULATORS, {"norm_before_residual": ...}),
        "does not say norm_before_residual, which speculators takes for false and vLLM for true",
    ),
    "SpecForge's output without a norm": (
        "eagle3",
        edited(FORMATS["SpecForge"][1], {"norm_output": False}),
        "says norm_output False, and no fc_norm: in SpecForge's words",
    ),
    "a width that its heads do not divide": (
        "eagle3",
        edited(NATIVE, {"num_attention_heads": 5}),
        "hidden_size 64 is no multiple of its 5 attention heads; the target's hidden size is 64, with 4 heads",
    ),
    "such a width, elsewhere": (
        "eagle",
        edited(EAGLE1, {"model_type": "qwen2", "num_attention_heads": 3}),
        "hidden_size 64 is no multiple of its 3 attention heads; the target's hidden size is 64, with 4 heads",
    ),
    "a norm without weights": (
        "eagle3",
        edited(SPECULATORS, {"fc_norm": True}),
        "says fc_norm True, and fc_norm.0.weight is missing",
    ),
    "another speculator": (
        "eagle3",
        edited(SPECULATORS, {"speculators_model_type": "dflash"}),
        "speculators_model_type is 'dflash', not 'eagle3'",
    ),
    "another vocabulary": (
        "eagle",
        eagle(EMBED[:100], OUTPUT),
        "embed_tokens.weight is of 100 tokens, the target's vocabulary has 256",
    ),
    "another vocabulary, of t2d": (
        "eagle3",
        edited(NATIVE, t2d=torch.cat((NATIVE.tensors["t2d"], torch.zeros(700, dtype=torch.bool)))),
        "t2d is of 956 tokens, the target's vocabulary has 256",
    ),
    "another vocabulary, of the config": (
        "eagle3",
        edited(FORMATS["EAGLE-3, whole vocabulary"][1], {"vocab_size": 1000}),
        "vocab_size is of 1000 tokens, the target's vocabulary has 256",
    ),
    "another vocabulary, of its own output layer": (
        "eagle",
        edited(EAGLE1, **{"lm_head.weight": torch.zeros(100, 64)}),
        "lm_head.weight is of 100 tokens, the target's vocabulary has 256",
    ),
    "a layer with other norms": (
        "eagle",
        edited(EAGLE1, {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}),
        "the head's layer is of model type 'gemma3_text'",
    ),
    "no description of the layer": (
        "eagle3",
        edited(SPECULATORS, {"transformer_layer_config": ["llama"]}),
        "config.json has no transformer_layer_config",
    ),
    "layers that are no numbers": (
        "eagle3",
        edited(SPECULATORS, {"eagle_aux_hidden_state_layer_ids": ["1", "3", "5"]}),
        "eagle_aux_hidden_state_layer_ids is ['1', '3', '5'], which is no list of layers",
    ),
    "layers that are no list": (
        "eagle3",
        edited(NATIVE, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}),
        "eagle_aux_hidden_state_layer_ids is 3, which is no list of layers",
    ),
    "an eagle_config that is none": ("eagle3", edited(NATIVE, {"eagle_config": [1]}), "eagle_config [1], which is no"),
    "a flag that is none": (
        "eagle3",
        edited(SPECULATORS, {"norm_before_residual": "false"}),
        "says norm_before_residual 'false', which is neither true nor false",
    ),
    "whole numbers as weights": (
        "eagle3",
        edited(NATIVE, **{"fc.weight": torch.ones(64, 192, dtype=torch.int8)}),
        "fc.weight is of type torch.int8: quantised heads are not supported",
    ),
    "a lone number": ("eagle3", edited(NATIVE, **{"fc.weight": torch.tensor(1.0)}), "fc.weight reads 0 values"),
    "a lone number as a vocabulary": (
        "eagle3",
        edited(NATIVE, **{"embed_tokens.weight": torch.tensor(1.0)}),
        "embed_tokens.weight is of 0 tokens",
    ),
    "an impossible config": (
        "eagle",
        edited(EAGLE1, {"hidden_act": "relu"}),
        "config.json: activation 'relu' is not supported",
    ),
    "two layers": (
        "eagle3",
        edited(NATIVE, **{"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}),
        "layers.1.mlp.up_proj.weight belongs to a second layer",
    ),
    "a tensor missing": ("eagle3", edited(NATIVE, **{"norm.weight": None}), "tensor norm.weight is missing"),
    "a tensor of another shape": (
        "eagle",
        edited(EAGLE1, **{"layers.0.self_attn.o_proj.weight": torch.zeros(64, 64)}),
        "layer.self_attn.o_proj.weight has shape [64, 64], [64, 96] is expected",
    ),
    "no head at all": ("eagle", edited(EAGLE1, **{"fc.weight": None}), "holds no draft head that is known"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_heads_that_do_not_fit_are_refused(case: tuple[str, Head, str], tmp_path: Path) -> None:
    method, head, *messages = case
    with pytest.raises(PacelineError) as error:
        load(method, head, tmp_path)
    assert all(message in str(error.value) for message in messages), error.value
    assert "\n" not in str(error.value)


def test_the_layers_may_be_named_outright(tmp_path: Path) -> None:
    head = SPECULATORS.write(tmp_path)
    assert load_eagle3(str(head), TARGET).hidden_layers == (0, 2, 4)
    assert load_eagle3(str(head), TARGET, aux_layers=(1, 3, 6)).hidden_layers == (1, 3, 6)


def drafted_logits(method: str, head: Head, folder: Path) -> torch.Tensor:
    drafter = EagleDrafter(method, load(method, head, folder), TREES["chain"])
    following = Following(drafter, tiny.prompt(9))
    following.observe()
    drafter.propose([following.request], [1])
    return following.request.noted[()]


def test_an_output_layer_of_its_own_is_used(tmp_path: Path) -> None:
    own = edited(EAGLE1, **{"lm_head.weight": 2 * OUTPUT})
    expected = 2 * drafted_logits("eagle", EAGLE1, tmp_path / "shared")
    torch.testing.assert_close(drafted_logits("eagle", own, tmp_path / "own"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [240, 280])
def test_paddings_may_differ(rows: int, tmp_path: Path) -> None:
    embed = torch.cat((EAGLE1.tensors["embed_tokens.weight"], torch.zeros(24, 64).double()))[:rows]
    padded = edited(EAGLE1, **{"embed_tokens.weight": embed})
    head = load("eagle", padded, tmp_path)
    drafter = EagleDrafter("eagle", head, TREES["chain"])
    following = Following(drafter, [token % 240 for token in tiny.prompt(20)])
    following.observe()
    following.check(EAGLE1, 1)
    following.request.token_ids = [*following.request.token_ids, 250]  # more than there are rows: any stand-in will do
    following.observe()
    assert len(drafter.propose([following.request], [3])[0]) == 3


def test_a_window_of_the_heads_own_layer_is_kept(tmp_path: Path) -> None:
    config = FORMATS["speculators, Qwen 3"][1].config["transformer_layer_config"]
    assert isinstance(config, dict)
    sliding = {**config, "layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    of_the_target = {**sliding, "layer_types": ["sliding_attention"] * NUM_LAYERS, "max_window_layers": 3}
    for described, window in ((sliding, 8), (of_the_target, None)):
        head = edited(FORMATS["speculators, Qwen 3"][1], {"transformer_layer_config": described})
        assert load("eagle3", head, tmp_path).layer.window == window


def test_a_chain_is_as_long_as_a_step_allows() -> None:
    """A request, or a later setting, may ask for another K than the first one."""
    for method, tree in (("eagle", None), ("eagle", "chain"), ("medusa", "chain")):
        config = SpeculativeConfig(method, 2, model="x", speculative_token_tree=tree)
        shape = _tree(config) if tree is None else config.tree(EAGLE_TREE)
        assert isinstance(shape, StaticTree)
        assert shape.first(7) == StaticTree.chain(7)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_draft_that_has_no_room_draws_nothing(tree: TreeShape, tmp_path: Path) -> None:
    """What is drawn must be proposed: whether there is room may hang on which tokens were drawn."""
    drafter = EagleDrafter("eagle", load("eagle", EAGLE1, tmp_path), tree, 64)
    following = Following(drafter, tiny.prompt(65))  # its rows fill a block
    following.observe()
    with pytest.raises(CacheFull):
        drafter.propose([following.request], [4])
    assert not following.request.noted
    drafter.pool = drafter.head.layer.new_pool(128)
    drafter.restore(following.request, None, 0)
    following.observed = 0
    following.observe()
    following.check(EAGLE1, 4)
