"""The target's first layers and its output head draft; verification goes on where they stopped.

Idea: a model trained for it often knows the next token after a quarter of its layers. Draft and target share one cache:
what the first layers computed for a drafted token (keys, values, and the hidden state that leaves them) is exactly what
verification would compute, so its pass runs only the other layers for those rows.
Cost a step: K passes of E layers and the head, most of it saved again in the target's pass.
Pays with models trained for early exits (LayerSkip's), or with an adapter trained for the exit (`paceline train
early_exit`); bare, others agree with their early layers less often.
Lossless under every lossless rule: whether to stop is settled by the distribution before a token is drawn.
Source: Elhoushi et al., LayerSkip, 2404.16710.
"""

from collections.abc import Sequence

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Needs, SequenceView
from paceline.drafters.chain import DEFAULT_CONFIDENCE, draft_in_place
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.stateless import Stateless
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder, LayerStep
from paceline.models.exit_adapter import ExitAdapter, load_exit_adapter
from paceline.models.load import LoadedModel
from paceline.models.origin import check_origin
from paceline.models.shipped import shipped_head


class EarlyExitDrafter(Stateless):
    """Drafts chains with the first `num_layers` layers of `target`, read by its output layer through an `adapter`."""

    name = "early_exit"

    def __init__(
        self,
        target: Decoder,
        num_layers: int,
        min_confidence: float = DEFAULT_CONFIDENCE,
        adapter: ExitAdapter | None = None,
    ) -> None:
        self.target = target
        self.read = target.logits if adapter is None else adapter.logits
        self.min_confidence = min_confidence
        self.needs = Needs(early_layer=num_layers, looks_ahead=True)
        self.layers = [LayerStep(i) for i in range(num_layers)]

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        drafts = draft_in_place(self.target, self.layers, self.read, sequences, budgets, self.min_confidence)
        return [draft.early_proposal() for draft in drafts]


def default_exit(num_layers: int) -> int:
    """A quarter of the layers."""
    return max(1, num_layers // 4)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    count, layer, adapter = target.config.num_layers, config.early_exit_layer, None
    # a layer that somebody names is one to leave at as it is
    model = config.model or (shipped_head("early_exit", target) if layer is None else None)
    if model is not None:
        check_origin(model, target)
        adapter = load_exit_adapter(model, target.decoder, config.draft_dtype)
        if layer not in (None, adapter.num_layers):
            raise PacelineError(
                f"early_exit_layer is {layer}, and {model} was trained for layer {adapter.num_layers}",
                hint="leave early_exit_layer out",
            )
        layer = adapter.num_layers
    elif config.draft_dtype is not None:
        raise PacelineError(
            f"draft_dtype is {config.draft_dtype}, and early_exit has no adapter whose matrices could be held in it",
            hint='leave it out, or name an adapter: "model": a folder or a Hub id',
        )
    if layer is None:
        layer = default_exit(count)
    if layer >= count:
        raise PacelineError(f"early_exit_layer is {layer} and the model has {count} layers: the exit must come before")
    threshold = config.draft_confidence_threshold
    return EarlyExitDrafter(target.decoder, layer, DEFAULT_CONFIDENCE if threshold is None else threshold, adapter)
