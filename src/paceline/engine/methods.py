"""A drafting method made ready for an engine; `auto` with its policy, from a kept profile or a fresh measurement."""

import json
from dataclasses import asdict, replace
from typing import cast

from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.policy import Choosing
from paceline.engine.acceptance import FULL_LENGTH, PositionRates
from paceline.engine.costs import CostTable
from paceline.engine.engine import Engine
from paceline.engine.measure import measured
from paceline.engine.policy import AutoPolicy
from paceline.engine.profile import Profile, ProfileStore
from paceline.engine.usage import Usage
from paceline.models.home import Progress, silent
from paceline.models.load import LoadedModel

WORTH_HAVING = 1.3  # of a speed-up promised: one that had promised over 1.1 made `auto` 5 % slower on other prompts


def add_method(engine: Engine, model: LoadedModel, config: SpeculativeConfig, progress: Progress = silent) -> None:
    """Load the drafter that a configuration names, for requests to use. Raises PacelineError for what cannot be."""
    drafter, policy = create_drafter(config, model), engine.policy
    if config.method == "auto":
        policy = auto_policy(cast(Choosing, drafter), model, config, progress)
    engine.add_method(config.method, drafter, config.num_speculative_tokens)
    engine.policy = policy


def auto_policy(
    drafter: Choosing, model: LoadedModel, config: SpeculativeConfig, progress: Progress = silent
) -> AutoPolicy:
    """The policy of a drafter that nothing was drafted with yet; measures in under two seconds what is not known.

    What was measured on a busy machine is used, and not kept: the next start measures again. Nor is what costs seemed
    to be in use, or a busy hour would mislead the calm one after it; rates of acceptance are kept.
    """
    store = ProfileStore.of(model.decoder, _described(drafter, config))
    profile, calm = store.load(), True
    if profile is None:
        to_measure = {n: one.drafter for n, one in drafter.by_name.items() if n not in drafter.lookups}
        found = measured(model.decoder, to_measure, progress=progress)
        profile = Profile(found.costs, PositionRates(), PositionRates(FULL_LENGTH))
        calm = found.calm
        if calm:
            store.save(profile)
    as_measured = CostTable.from_json(profile.costs.to_json())
    usage = Usage(left_out=_left_out(drafter, profile.costs))

    def save(learnt: Profile) -> None:
        if calm:
            store.save(replace(learnt, costs=as_measured))

    policy = AutoPolicy(drafter, profile.costs, profile.acceptance, profile.lengths, save, usage=usage)
    drafter.policy = policy
    return policy


def _left_out(drafter: Choosing, costs: CostTable) -> dict[str, float]:
    """Members on trial that cannot pay here are left out; the speed-up that each could have, at the best of its K."""
    found: dict[str, float] = {}
    for name, acceptance in drafter.on_trial.items():
        depths = range(1, 1 + len(acceptance)) if name in costs.drafts else ()
        best = max((costs.speedup(name, acceptance[:k]) for k in depths), default=0.0)
        if best < WORTH_HAVING:
            drafter.leave_out(name)
            found[name] = best
    return found


def _described(drafter: Choosing, config: SpeculativeConfig) -> str:
    """What the costs of drafting hang on."""
    settled = replace(config, num_speculative_tokens=0, draft_cache_tokens=None)
    return json.dumps([sorted(drafter.by_name), asdict(settled)], default=str, sort_keys=True)
