"""Which drafting methods there are, and what each needs and takes. Pure data: nothing here imports torch.

A method of another package is an entry point of the group `paceline.drafters` that names a `Method`; its package is
imported only when the method is asked for. `docs/add-a-drafter.md` shows one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from paceline.errors import PacelineError
from paceline.values import shown

GROUP = "paceline.drafters"
# The lossless rules that take drafts of a shape.
RULES = {"chain": ("coupled", "standard", "block"), "tree": ("coupled", "standard")}


@dataclass(frozen=True, slots=True)
class Method:
    """A drafting method, as the registry knows it. Raises ValueError for a field that means nothing.

    factory: "module:attribute", a function of (SpeculativeConfig, LoadedModel) that builds the Drafter.
    summary: half a line. options: the keys of `speculative_config` that it takes besides method and
    num_speculative_tokens; those that SpeculativeConfig does not have arrive in its `method_options`.
    needs: "nothing", a draft "model", a trained "head", or other "methods".
    shapes: of its drafts, "chain" or "tree"; of two, the first is what it drafts unless told otherwise.
    paper: an arXiv number, or another source. lookup: it drafts from the text alone, in microseconds and without
    chance, so that a draft may be looked at before it is decided whether to use it. stateless: between steps it keeps
    nothing of a request, as a class that inherits all its bookkeeping from `Stateless` does; the contract tests hold a
    method to what it says.
    """

    factory: str
    summary: str
    options: frozenset[str] = frozenset()
    needs: str = "nothing"
    shapes: tuple[str, ...] = ("chain",)
    paper: str = ""
    lookup: bool = False
    stateless: bool = False

    def __post_init__(self) -> None:
        if self.needs not in ("nothing", "model", "head", "methods"):
            raise ValueError(f"needs is {self.needs!r}; it must be nothing, model, head or methods")
        if not self.shapes or not RULES.keys() >= set(self.shapes):
            raise ValueError(f"shapes is {self.shapes!r}; it must hold chain, tree or both")

    @property
    def needs_model(self) -> bool:
        """Whether it can do nothing without the key "model", which names a draft model or a head."""
        return self.needs in ("model", "head")

    @property
    def rules(self) -> tuple[str, ...]:
        """The lossless rules that take its drafts, in one shape or another."""
        return max((RULES[shape] for shape in self.shapes), key=len)


_HEAD = frozenset({"model", "draft_dtype", "speculative_token_tree", "tree_depth", "tree_top_k"})
_SINGLE = {
    "none": Method("paceline.drafters.none:create", "plain decoding", stateless=True),
    "ngram": Method(
        "paceline.drafters.ngram:create",
        "prompt lookup: what followed the same tokens last time",
        frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
        paper="Saxena, prompt-lookup-decoding (2023)",
        lookup=True,
    ),
    "suffix": Method(
        "paceline.drafters.suffix:create",
        "what most often followed the same tokens, here and in earlier answers",
        frozenset(
            {
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_corpus_tokens",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_max_spec_offset",
                "suffix_decoding_min_token_prob",
                "suffix_decoding_min_score",
            }
        ),
        paper="2411.04975",
        lookup=True,
    ),
    "draft_model": Method(
        "paceline.drafters.draft_model:create",
        "a smaller model with the same vocabulary",
        frozenset({"model", "draft_dtype", "draft_vocab_size", "draft_cache_tokens", "draft_confidence_threshold"}),
        needs="model",
        paper="2211.17192, 2302.01318",
    ),
    "layer_skip": Method(
        "paceline.drafters.layer_skip:create",
        "the target itself, with some of its sublayers left out",
        frozenset({"skip_attention_layers", "skip_mlp_layers", "draft_confidence_threshold"}),
        paper="2309.08168, 2410.06916",
        stateless=True,
    ),
    "early_exit": Method(
        "paceline.drafters.early_exit:create",
        "the target's first layers; verification goes on where they stopped",
        frozenset({"model", "draft_dtype", "early_exit_layer", "draft_confidence_threshold"}),
        paper="2404.16710",
        stateless=True,
    ),
    "lookahead": Method(
        "paceline.drafters.lookahead:create",
        "n-grams that the target itself foresees in a window beside the text",
        frozenset({"lookahead_window", "lookahead_ngram", "lookahead_guesses"}),
        shapes=("tree",),
        paper="2402.02057",
    ),
    "token_recycling": Method(
        "paceline.drafters.token_recycling:create",
        "a tree of the tokens that the target last thought likely after each",
        frozenset({"recycled_successors"}),
        shapes=("tree",),
        paper="2408.08696",
    ),
    "medusa": Method(
        "paceline.drafters.medusa:create",
        "heads that guess several tokens ahead",
        _HEAD,
        needs="head",
        shapes=("tree", "chain"),
        paper="2401.10774",
    ),
    "eagle": Method(
        "paceline.drafters.eagle:create",
        "a one-layer head on the target's last hidden state (EAGLE-1, EAGLE-2)",
        _HEAD | {"draft_cache_tokens"},
        needs="head",
        shapes=("chain", "tree"),
        paper="2401.15077, 2406.16858",
    ),
    "eagle3": Method(
        "paceline.drafters.eagle:create_eagle3",
        "a one-layer head on three of the target's hidden states (EAGLE-3)",
        _HEAD | {"draft_cache_tokens", "aux_hidden_layers"},
        needs="head",
        shapes=("chain", "tree"),
        paper="2503.01840",
    ),
}
METHODS: dict[str, Method] = {
    **_SINGLE,
    "composite": Method(
        "paceline.drafters.composite:create",
        "several methods in order: the first that has a draft",
        frozenset({"methods"}).union(*(method.options for method in _SINGLE.values())),
        needs="methods",
        shapes=("chain", "tree"),
        paper="2411.04975",
    ),
    "auto": Method(
        "paceline.drafters.auto:create",
        "of several methods whichever pays, by measured cost and acceptance, or none",
        frozenset({"methods"}).union(*(method.options for method in _SINGLE.values())),
    ),
}
"""The methods of this package."""
OF_METHODS = ("composite", "auto")
"""Those that draft by others."""


def names() -> tuple[str, ...]:
    """All methods, ours first. Imports none of their packages."""
    return (*METHODS, *sorted({point.name for point in _installed()} - METHODS.keys()))


def find(name: str) -> Method:
    """The method of that name. Raises PacelineError if there is none, if there are two, or if it cannot be loaded."""
    points = [point for point in _installed() if point.name == name]
    bringers = [*(["Paceline itself"] if name in METHODS else []), *sorted(_package(point) for point in points)]
    if len(bringers) > 1:
        raise PacelineError(
            f"the method name {shown(name)} is taken twice: by {' and by '.join(bringers)}",
            hint=f"uninstall {bringers[-1]}, or let its author rename the method",
        )
    if not bringers:
        raise PacelineError(f"unknown speculative method {shown(name)}", hint=f"one of: {', '.join(names())}")
    return METHODS[name] if name in METHODS else _load(points[0])


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


def _load(point: EntryPoint) -> Method:
    try:
        method = point.load()
    except Exception as error:  # whatever that package breaks with
        raise PacelineError(
            f"method {shown(point.name)} of {_package(point)} cannot be loaded: {type(error).__name__}: {error}",
            hint=f"{point.value} must name a paceline.drafters.registry.Method",
        ) from error
    if not isinstance(method, Method):
        raise PacelineError(
            f"method {shown(point.name)} of {_package(point)} cannot be loaded: {point.value} is {shown(method)}",
            hint="it must name a paceline.drafters.registry.Method",
        )
    return method


def _package(point: EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else point.dist.name
