"""The target drafts for itself with some of its sublayers left out.

Idea: residual streams change slowly, so leaving out a good part of the attention and MLP sublayers often leaves the
next token as it is. The draft reads the target's own keys and values of the committed text, so it needs no weights, no
cache and no catching up, and has nothing to remember; verification writes every row it wrote again.
Cost a step: K passes of the sublayers kept. Pays where they are few and agree: find them with `paceline tune`.
Lossless under every lossless rule: whether to stop is settled by the distribution before a token is drawn.
Sources: Zhang et al., Draft & Verify, 2309.08168; Xia et al., SWIFT, 2410.06916.
"""

from collections.abc import Collection, Sequence

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Needs, SequenceView
from paceline.drafters.chain import DEFAULT_CONFIDENCE, draft_in_place
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, LayerStep
from paceline.models.load import LoadedModel


class LayerSkipDrafter(Stateless):
    """Drafts chains with all sublayers of `target` but those skipped."""

    name = "layer_skip"
    needs = Needs(looks_ahead=True)

    def __init__(
        self,
        target: Decoder,
        skip_attention: Collection[int],
        skip_mlp: Collection[int],
        min_confidence: float = DEFAULT_CONFIDENCE,
    ) -> None:
        self.target = target
        self.min_confidence = min_confidence
        layers = range(target.config.num_layers)
        self.layers = [LayerStep(i, i not in skip_attention, i not in skip_mlp) for i in layers]

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        drafts = draft_in_place(self.target, self.layers, self.target.logits, sequences, budgets, self.min_confidence)
        return [draft.proposal() for draft in drafts]


def default_skips(num_layers: int) -> tuple[int, ...]:
    """Every second layer of the middle half: first and last layers matter most."""
    return tuple(range(num_layers // 4, num_layers - num_layers // 4, 2))


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    count = target.config.num_layers
    given = (config.skip_attention_layers, config.skip_mlp_layers)
    for name, layers in zip(("skip_attention_layers", "skip_mlp_layers"), given, strict=True):
        if layers and max(layers) >= count:
            raise PacelineError(f"{name} names layer {max(layers)} and the model has {count} layers, from 0")
    default = default_skips(count) if given == (None, None) else ()
    attention, mlp = (default if layers is None else layers for layers in given)
    threshold = config.draft_confidence_threshold
    return LayerSkipDrafter(target.decoder, attention, mlp, DEFAULT_CONFIDENCE if threshold is None else threshold)
