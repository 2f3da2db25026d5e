"""`speculative_config`: vLLM's keys, Hugging Face's aliases, nothing accepted and ignored."""

from pathlib import Path

import pytest

from paceline.core.tree_shapes import EAGLE_TREE, MEDUSA_TREE, DynamicTree, StaticTree
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import METHODS
from paceline.errors import PacelineError
from paceline.models import shipped


def test_keys_and_aliases() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3})
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max) == ("ngram", 5, 3)
    config = SpeculativeConfig.from_dict({"assistant_model": "x", "num_assistant_tokens": 7})
    assert (config.method, config.model, config.num_speculative_tokens) == ("draft_model", "x", 7)
    assert SpeculativeConfig.from_dict({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}).method == "ngram"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be a whole number from 0 to 128"),
        ({"num_speculative_tokens": 129}, "num_speculative_tokens is 129"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min is 5 but prompt_lookup_max is 2"),
        ({"speculative_tokens": 4}, "has no key 'speculative_tokens'"),
        ({"num_draft_tokens": 4, "num_assistant_tokens": 4}, "gives num_speculative_tokens twice"),
        ({"speculative_token_tree": "bush"}, "speculative_token_tree is 'bush'; it must be one of chain, static"),
        ({"speculative_token_tree": [[0], ["a"]]}, "or a list of paths of ranks"),
        ({"speculative_token_tree": [[0], [1, 0]]}, "the draft tree has [1, 0] but not [1]"),
        ({"tree_depth": 3}, "tree_depth is 3, and speculative_token_tree is None: it is for dynamic trees"),
        ({"tree_top_k": 0, "speculative_token_tree": "dynamic"}, "tree_top_k is 0"),
        ({"aux_hidden_layers": "1"}, "aux_hidden_layers is '1'; it must be a list of layers"),
        ({"aux_hidden_layers": [1, -1]}, "a layer of aux_hidden_layers is -1"),
    ],
)
def test_bad_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError) as error:
        SpeculativeConfig.from_dict(values)
    assert message in str(error.value)


def test_unknown_methods_and_foreign_options_are_refused() -> None:
    with pytest.raises(PacelineError, match="unknown speculative method 'egale'") as error:
        create_drafter(SpeculativeConfig(method="egale"), None)  # type: ignore[arg-type]
    assert error.value.hint is not None and all(name in error.value.hint for name in METHODS)
    with pytest.raises(PacelineError, match="'none' does not take prompt_lookup_max"):
        create_drafter(SpeculativeConfig(prompt_lookup_max=3), None)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="'ngram' does not take model"):
        create_drafter(SpeculativeConfig(method="ngram", model="x"), None)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="needs a draft model"):
        create_drafter(SpeculativeConfig(method="draft_model"), None)  # type: ignore[arg-type]


def test_shapes_of_heads_trees() -> None:
    """Sizes as published unless told; a list of paths, or vLLM's string of one."""
    nodes = {
        (method, tree): SpeculativeConfig.from_dict(
            {"method": method, "model": "x", **({"speculative_token_tree": tree} if tree else {})}
        ).num_speculative_tokens
        for method in ("medusa", "eagle", "eagle3")
        for tree in (None, "chain", "static", "dynamic")
    }
    assert [nodes["medusa", tree] for tree in (None, "chain", "static", "dynamic")] == [63, 4, 63, 59]
    assert [nodes["eagle", tree] for tree in (None, "chain", "static", "dynamic")] == [4, 4, 25, 59]
    assert [nodes["eagle3", tree] for tree in (None, "chain", "static", "dynamic")] == [4, 4, 25, 59]
    assert len(MEDUSA_TREE.paths) == 63 and len(EAGLE_TREE.paths) == 25

    text = SpeculativeConfig.from_dict({"method": "eagle", "speculative_token_tree": "[(0,), (1,), (0, 0)]"})
    listed = SpeculativeConfig.from_dict({"method": "eagle", "speculative_token_tree": [[0], [1], [0, 0]]})
    assert text == listed and text.num_speculative_tokens == 3
    assert text.tree(EAGLE_TREE) == StaticTree(((0,), (1,), (0, 0)))
    dynamic = SpeculativeConfig(speculative_token_tree="dynamic", tree_depth=3, tree_top_k=2)
    assert dynamic.tree(EAGLE_TREE) == DynamicTree(2, 3, EAGLE_TREE)
    assert SpeculativeConfig(speculative_token_tree="dynamic").tree(EAGLE_TREE) == DynamicTree(10, 8, EAGLE_TREE)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_heads_are_needed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)  # a package without heads
    with pytest.raises(PacelineError, match=f"method '{method}' needs its head"):
        create_drafter(SpeculativeConfig(method=method), None)  # type: ignore[arg-type]
