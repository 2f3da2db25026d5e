"""How speculation is asked for: vLLM's keys, with Hugging Face's names as aliases."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline.drafters.registry import METHODS, find, names
from paceline.errors import PacelineError
from paceline.models.precision import precision_of
from paceline.values import elements, is_finite, is_whole, shown

if TYPE_CHECKING:  # a command line that only reads its arguments does without torch
    from paceline.core.tree_shapes import StaticTree, TreeShape

MAX_DRAFT_TOKENS = 128  # vLLM's bound, too
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_SUFFIX_DEPTH = 24
# Nodes of the trees as published; EAGLE's total_token of 60 counts the root.
TREE_NODES: dict[str, dict[str | None, int]] = {
    "medusa": {None: 63, "static": 63, "dynamic": 59},
    "eagle": {"static": 25, "dynamic": 59},
    "eagle3": {"static": 25, "dynamic": 59},
}
EXAMPLE = '{"method": "ngram"}'
TREE_NAMES = ("chain", "static", "dynamic")
DEFAULT_LOOKAHEAD = (5, 5, 3)  # window, n-gram, guesses: with the last token 32 rows at most
DEFAULT_RECYCLED_TOKENS = 24

ALIASES = {
    "num_draft_tokens": "num_speculative_tokens",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "assistant_model": "model",
    "draft_model": "model",
    "max_matching_ngram_size": "prompt_lookup_max",
    "max_window_size": "lookahead_window",  # TensorRT-LLM's
    "max_ngram_size": "lookahead_ngram",
    "max_verification_set_size": "lookahead_guesses",
    "assistant_early_exit": "early_exit_layer",
    "assistant_confidence_threshold": "draft_confidence_threshold",
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`speculative_config`, checked. Raises PacelineError naming the key, its value and its range."""

    method: str = "none"
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS
    """Tokens drafted a step (K), at most; 0 is plain decoding. `from_dict` gives suffix its depth, as vLLM does."""
    model: str | None = None
    """The draft model: an alias, a folder, a GGUF file or a Hub id."""
    draft_dtype: str | None = None
    """The precision of the draft model, or of a draft head: a name that `dtype` of a model may have. None: a model
    takes the target's; a head's matrices are int8 beside a target whose own are packed, else as the target's."""
    draft_vocab_size: int | None = None
    """The draft model draws from this many token ids alone, the lowest; None: from all. A draft step pays for every row
    of the output layer, and byte-pair vocabularies number tokens in the order of their merges, roughly the most
    frequent first; nothing is counted. Where a vocabulary is ordered otherwise, leave it out."""
    draft_cache_tokens: int | None = None
    """Rows of all requests together that the draft model's cache may hold; None: as many as the engine can use."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram looked up."""
    prompt_lookup_max: int | None = None
    """Longest n-gram looked up."""
    suffix_decoding_max_tree_depth: int | None = None
    """Most tokens of context that a suffix match looks at; None is 24."""
    suffix_decoding_max_cached_requests: int | None = None
    """Finished requests whose outputs others may draft from; 0 keeps every request to itself, None is 10,000."""
    suffix_decoding_corpus_tokens: int | None = None
    """Tokens of such outputs kept, at most; None is 200,000."""
    suffix_decoding_max_spec_factor: float | None = None
    """A match of m tokens drafts at most factor·m + offset; None is 1."""
    suffix_decoding_max_spec_offset: float | None = None
    """See the factor; None is 0."""
    suffix_decoding_min_token_prob: float | None = None
    """A draft ends before a token less likely than this, going by frequency; None is 0.1."""
    suffix_decoding_min_score: float | None = None
    """No draft of which fewer tokens are expected to be right; None is 0, or 2 if another method comes after it."""
    speculative_token_tree: "str | StaticTree | None" = None
    """The shape of a head's drafts: "chain", "static" (the method's published tree), "dynamic" (EAGLE-2's), or a list
    of paths of ranks, best first (or vLLM's string of one). None: "static" for medusa, "chain" for eagle and eagle3.
    A tree has at most `num_speculative_tokens` nodes; `from_dict` gives it as many as were published with it.
    """
    tree_depth: int | None = None
    """Levels of a dynamic tree; None is 8, EAGLE's `depth` of 7 and the root's children."""
    tree_top_k: int | None = None
    """Children of a node, and nodes of a level that get some, in a dynamic tree; None is 10."""
    aux_hidden_layers: tuple[int, ...] | None = None
    """Layers of the target whose *outputs* an EAGLE-3 head reads, counted from 0 (Hugging Face's hidden_states[i + 1]);
    None: what the checkpoint says."""
    skip_attention_layers: tuple[int, ...] | None = None
    """Layers whose attention `layer_skip` leaves out; without either list: every second layer of the middle half."""
    skip_mlp_layers: tuple[int, ...] | None = None
    """Layers whose MLP it leaves out."""
    early_exit_layer: int | None = None
    """`early_exit` drafts with the first so many layers; None is a quarter of them."""
    draft_confidence_threshold: float | None = None
    """A draft ends where it is in doubt; 0: never. The target's own layers stop where their likeliest token has a lower
    probability, None is 0.4; a draft model where the product of those of its whole draft is lower, None is 0.5."""
    lookahead_window: int | None = None
    """Columns of `lookahead`'s window (W); None is 5."""
    lookahead_ngram: int | None = None
    """Tokens of its n-grams (N), the first one included; None is 5."""
    lookahead_guesses: int | None = None
    """N-grams it verifies a step (G), at most; None is 3."""
    recycled_successors: int | None = None
    """Successors that `token_recycling` keeps of every token; None is 8."""
    methods: "tuple[SpeculativeConfig, ...] | None" = None
    """The methods of `composite`, first choice first, or those that `auto` chooses from: names, or mappings like this
    one's with options of their own. None: `auto` takes suffix, ngram, and what `model` names."""
    method_options: Mapping[str, Any] | None = None
    """Options that a method of another package has of its own, by name; in `from_dict` they stand among the others."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise PacelineError(f"method is {shown(self.method)}; it must be a method's name")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        self._check_suffix()
        for name in ("skip_attention_layers", "skip_mlp_layers"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _layers(name, getattr(self, name)))
        for name, least, most in (
            ("lookahead_window", 1, MAX_DRAFT_TOKENS),
            ("lookahead_ngram", 3, 32),
            ("lookahead_guesses", 1, MAX_DRAFT_TOKENS),
            ("recycled_successors", 1, 64),
        ):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), least, most)
        if self.early_exit_layer is not None:
            _check_integer("early_exit_layer", self.early_exit_layer, 1, 2**16)
        if self.draft_confidence_threshold is not None:
            _check_real("draft_confidence_threshold", self.draft_confidence_threshold, 0, 1)
        if self.methods is not None:
            object.__setattr__(self, "methods", _members(self.methods, self.num_speculative_tokens))
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, 64)
        self._check_tree()
        if self.draft_dtype is not None:
            precision_of(self.draft_dtype, "draft_dtype")
        if self.draft_vocab_size is not None:
            _check_integer("draft_vocab_size", self.draft_vocab_size, 1, 2**31)
        if self.draft_cache_tokens is not None:
            _check_integer("draft_cache_tokens", self.draft_cache_tokens, 1, 2**31)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise PacelineError(f"prompt_lookup_min is {low} but prompt_lookup_max is {high}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """From `speculative_config={…}`. An unknown key, or a key and its alias together, is refused."""
        if not isinstance(values, Mapping):
            raise PacelineError(f"speculative_config is {shown(values)}; it must be a mapping", hint=EXAMPLE)
        known = {item.name for item in fields(cls)} - {"method_options"}
        foreign = _foreign_options(values.get("method")) - known
        found: dict[str, Any] = {}
        for key, value in values.items():
            if key in foreign:
                found.setdefault("method_options", {})[key] = value
                continue
            name = ALIASES.get(key, key)
            if name not in known:
                known |= foreign
                raise PacelineError(
                    f"speculative_config has no key {shown(key)}", hint=f"keys: {', '.join(sorted(known))}"
                )
            if name in found:
                raise PacelineError(f"speculative_config gives {name} twice, once as {shown(key)}")
            found[name] = value
        method, count = found.get("method"), found.get("num_speculative_tokens")
        if isinstance(method, str) and method == "none" and is_whole(count) and count:
            raise PacelineError(
                f"num_speculative_tokens {shown(count)} contradicts method none, which drafts nothing",
                hint="leave one of the two out",
            )
        if "method" not in found:  # as vLLM and transformers do, infer it from what was given
            if found.get("methods") is not None:
                found["method"] = "composite"
            elif found.get("model") is not None:
                found["method"] = "draft_model"
            elif "prompt_lookup_num_tokens" in values or {"prompt_lookup_min", "prompt_lookup_max"} & set(found):
                found["method"] = "ngram"
            elif any(name.startswith("suffix_decoding_") for name in found):
                found["method"] = "suffix"
        if "num_speculative_tokens" not in found and isinstance(found.get("method"), str):
            found.update(cls._default_draft_tokens(found))
        return cls(**found)

    @classmethod
    def _default_draft_tokens(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """What a method drafts if it isn't told: suffix up to its depth, composite what its members do."""
        match found.get("method"):
            case "suffix":
                depth = found.get("suffix_decoding_max_tree_depth")
                depth = DEFAULT_SUFFIX_DEPTH if depth is None else depth
                _check_integer("suffix_decoding_max_tree_depth", depth, 1, MAX_DRAFT_TOKENS)
                return {"num_speculative_tokens": depth}
            case "lookahead":
                window, ngram, guesses = cls(**found).lookahead_shape
                return {"num_speculative_tokens": min((window + guesses) * (ngram - 1) - 1, MAX_DRAFT_TOKENS)}
            case "token_recycling":
                return {"num_speculative_tokens": DEFAULT_RECYCLED_TOKENS}
            case "auto":  # so many that the policy has a choice
                if found.get("methods") is None:
                    return {"num_speculative_tokens": DEFAULT_SUFFIX_DEPTH}
                methods = _members(found["methods"], None, auto_draft_tokens)
                most = max((member.num_speculative_tokens for member in methods), default=0)
                return {"methods": methods, "num_speculative_tokens": max(most, DEFAULT_SUFFIX_DEPTH)}
            case "composite" if found.get("methods") is not None:
                methods = _members(found["methods"], None)
                most = max((member.num_speculative_tokens for member in methods), default=DEFAULT_DRAFT_TOKENS)
                return {"methods": methods, "num_speculative_tokens": most}
            case "medusa" | "eagle" | "eagle3" as method:
                tree = found.get("speculative_token_tree")
                if tree is None or _is_tree_name(tree):
                    return {"num_speculative_tokens": TREE_NODES[method].get(tree, DEFAULT_DRAFT_TOKENS)}
                own = _static_tree(tree)
                return {"speculative_token_tree": own, "num_speculative_tokens": len(own.paths)}
        return {}

    @property
    def drafts(self) -> bool:
        """Whether it is anything but plain decoding."""
        return self.method != "none" and self.num_speculative_tokens > 0

    @property
    def suffix_depth(self) -> int:
        """`suffix_decoding_max_tree_depth` or its default."""
        depth = self.suffix_decoding_max_tree_depth
        return DEFAULT_SUFFIX_DEPTH if depth is None else depth

    def tree(self, static: "StaticTree") -> "TreeShape":
        """The shape of a head's drafts; `static`: as the method was published."""
        from paceline.core.tree_shapes import DynamicTree, StaticTree

        match self.speculative_token_tree:
            case None | "static":
                return static
            case "dynamic":
                return DynamicTree(self.tree_top_k or 10, self.tree_depth or 8, unpruned=static)
            case StaticTree() as own:
                return own
        return StaticTree.chain(MAX_DRAFT_TOKENS)  # each step's budget cuts it

    def _check_tree(self) -> None:
        tree = self.speculative_token_tree
        if tree is not None and not _is_tree_name(tree):
            object.__setattr__(self, "speculative_token_tree", _static_tree(tree))
        for name in ("tree_depth", "tree_top_k"):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, 1, MAX_DRAFT_TOKENS)
                if self.speculative_token_tree != "dynamic":
                    raise PacelineError(
                        f"{name} is {value}, and speculative_token_tree is {shown(tree)}: it is for dynamic trees",
                        hint='"speculative_token_tree": "dynamic"',
                    )
        if self.aux_hidden_layers is not None:
            layers = elements(self.aux_hidden_layers)
            if not layers:
                raise PacelineError(
                    f"aux_hidden_layers is {shown(self.aux_hidden_layers)}; it must be a list of layers"
                )
            for layer in layers:
                _check_integer("a layer of aux_hidden_layers", layer, 0, 2**31 - 1)
            object.__setattr__(self, "aux_hidden_layers", layers)

    @property
    def lookahead_shape(self) -> tuple[int, int, int]:
        """Window, n-gram and guesses of `lookahead`, or their defaults."""
        given = (self.lookahead_window, self.lookahead_ngram, self.lookahead_guesses)
        window, ngram, guesses = (
            own if own is not None else usual for own, usual in zip(given, DEFAULT_LOOKAHEAD, strict=True)
        )
        return window, ngram, guesses

    def _check_suffix(self) -> None:
        for name, low, high in (
            ("max_tree_depth", 1, MAX_DRAFT_TOKENS),
            ("max_cached_requests", 0, 2**31 - 1),
            ("corpus_tokens", 1, 2**31 - 1),
        ):
            if getattr(self, f"suffix_decoding_{name}") is not None:
                _check_integer(f"suffix_decoding_{name}", getattr(self, f"suffix_decoding_{name}"), low, high)
        for name, least, most in (
            ("max_spec_factor", 0, MAX_DRAFT_TOKENS),
            ("max_spec_offset", -MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS),
            ("min_token_prob", 0, 1),
            ("min_score", 0, MAX_DRAFT_TOKENS),
        ):
            if getattr(self, f"suffix_decoding_{name}") is not None:
                _check_real(f"suffix_decoding_{name}", getattr(self, f"suffix_decoding_{name}"), least, most)
        factor, offset = self.suffix_decoding_max_spec_factor, self.suffix_decoding_max_spec_offset
        longest = (1 if factor is None else factor) * self.suffix_depth + (offset or 0)
        if longest < 1:
            raise PacelineError(
                f"suffix_decoding_max_spec_factor {factor} and _offset {offset} leave no match a draft of one token",
                hint="factor times matched tokens plus offset is the most that is drafted",
            )
        if self.suffix_decoding_max_cached_requests == 0 and self.suffix_decoding_corpus_tokens is not None:
            raise PacelineError(
                f"suffix_decoding_corpus_tokens is {self.suffix_decoding_corpus_tokens} "
                "but suffix_decoding_max_cached_requests is 0: nothing is kept",
                hint="leave one of the two out",
            )

    def options(self) -> set[str]:
        """The method's own keys that were set."""
        common = {"method", "num_speculative_tokens", "method_options"}
        own = {item.name for item in fields(self) if item.name not in common and getattr(self, item.name) is not None}
        return own | set(self.method_options or ())

    def check_options(self) -> None:
        """Raise PacelineError for an option that the method does not take."""
        taken = find(self.method).options
        foreign = sorted(self.options() - taken)
        if foreign:
            raise PacelineError(
                f"method {shown(self.method)} does not take {foreign[0]}",
                hint=f"it takes: {', '.join(sorted(taken)) or 'no options'}",
            )

    def check_used(self) -> None:
        """Raise PacelineError for an option that whoever runs this method alone would ignore."""
        if self.method == "none":
            self.check_options()
        members = (self, *(self.methods or ()))
        ignored = [] if self.drafts else [name for each in members for name in sorted(each.options() - {"methods"})]
        if ignored:
            what = "the draft model" if ignored[0] == "model" else ignored[0]
            raise PacelineError(
                f"{what} contradicts num_speculative_tokens 0, which is plain decoding",
                hint="leave one of the two out",
            )


def _foreign_options(method: object) -> frozenset[str]:
    """The options of a method that another package brings."""
    if not isinstance(method, str) or method in METHODS or method not in names():
        return frozenset()
    return find(method).options


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise PacelineError(f"{name} is {shown(value)}; it must be a whole number from {low} to {high}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if not is_finite(value) or not low <= value <= high:
        raise PacelineError(f"{name} is {shown(value)}; it must be a number from {low} to {high}")


def _is_tree_name(tree: object) -> bool:
    return isinstance(tree, str) and tree in TREE_NAMES  # an array has an `==` of its own


def _static_tree(paths: Any) -> "StaticTree":
    """A tree from a list of paths, or from vLLM's string of one."""
    from paceline.core.tree_shapes import StaticTree

    if isinstance(paths, StaticTree):
        return paths
    fault = PacelineError(
        f"speculative_token_tree is {shown(paths)}; "
        f"it must be one of {', '.join(TREE_NAMES)} or a list of paths of ranks",
        hint="for instance [[0], [0, 0], [1]]",
    )
    try:
        tree = [tuple(path) for path in (ast.literal_eval(paths) if isinstance(paths, str) else paths)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise fault from error
    if not tree or not all(is_whole(rank) for path in tree for rank in path):
        raise fault
    return StaticTree.of(tree)


def _layers(name: str, layers: object) -> tuple[int, ...]:
    if (numbers := elements(layers)) is None:
        raise PacelineError(
            f"{name} is {shown(layers)}; it must be a list of layer numbers", hint="for instance [8, 10]"
        )
    for number in numbers:
        _check_integer(name, number, 0, 2**16)
    return tuple(sorted(set(numbers)))


def auto_draft_tokens(method: str) -> dict[str, int]:
    """What a member of `auto` may draft at most, if nobody says: where that costs a pass a token, not too far."""
    if method not in names() or find(method).shapes[0] != "chain":
        return {}
    return {"num_speculative_tokens": DEFAULT_SUFFIX_DEPTH if find(method).lookup else 2 * DEFAULT_DRAFT_TOKENS}


def _members(
    methods: object, num_speculative_tokens: int | None, default: Callable[[str], dict[str, int]] = lambda method: {}
) -> tuple[SpeculativeConfig, ...]:
    """The members of a composite; those given by name alone draft `num_speculative_tokens`, or their own default."""
    if (members := elements(methods)) is None:
        raise PacelineError(
            f"methods is {shown(methods)}; it must be a list of methods", hint='["suffix", "draft_model"]'
        )
    shared = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    return tuple(
        _member(member, {**default(member), **shared} if isinstance(member, str) else shared) for member in members
    )


def _member(member: object, shared: Mapping[str, Any]) -> SpeculativeConfig:
    if isinstance(member, SpeculativeConfig):
        return member
    values = {"method": member} if isinstance(member, str) else member
    if not isinstance(values, Mapping):
        raise PacelineError(f"methods holds {shown(member)}; each must be a method's name, or a mapping")
    own = {ALIASES.get(key, key) for key in values}
    return SpeculativeConfig.from_dict({**{key: shared[key] for key in shared if key not in own}, **values})
