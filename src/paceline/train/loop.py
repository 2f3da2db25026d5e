"""The one training loop: batches in, checkpoints out. What is learnt from a batch is the recipe's business.

A step sums the losses of its packs, of all processes, and divides by the tokens that they were summed over: how a
step's samples are cut into packs, or dealt to processes, changes nothing. Everything follows from the seed and the
step's number, so a run that is resumed is the run that was never interrupted.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.home import write_json
from paceline.models.shipped import EVALUATION
from paceline.train import checkpoint
from paceline.train.batch import Batch
from paceline.train.dataset import Sample, batches
from paceline.train.optimizers import paced
from paceline.train.processes import Processes
from paceline.train.recipe import Outcome, Recipe
from paceline.train.settings import Settings

logger = logging.getLogger("paceline.train")

Features = Callable[[Sequence[Sample]], Batch]
Evaluate = Callable[[Path], Mapping[str, Any]]
"""Given a checkpoint's folder: how its drafter does on the samples held aside."""
Rewrite = Callable[[Sequence[Sample], int], Sequence[Sample]]
"""Given a pack and its number in the run: the samples to learn from in its stead."""
LOG = "log.jsonl"
CHECKPOINTS = "checkpoints"


def as_it_is(pack: Sequence[Sample], number: int) -> Sequence[Sample]:
    """No rewriting."""
    return pack


class Loop:
    """A run in `out`. `about`: what its provenance says; `evaluate` hears of every checkpoint that is due for it;
    `rewrite` may put other texts into a pack."""

    def __init__(
        self,
        recipe: Recipe,
        samples: Sequence[Sample],
        features: Features,
        settings: Settings,
        out: Path,
        about: Mapping[str, Any],
        evaluate: Evaluate | None = None,
        processes: Processes | None = None,
        rewrite: Rewrite = as_it_is,
    ) -> None:
        self.recipe, self.samples, self.features, self.settings = recipe, samples, features, settings
        self.out, self.about, self.evaluate = out, about, evaluate
        self.processes, self.rewrite = processes or Processes(), rewrite
        self.stop_after = settings.steps  # a visit may do a part; the schedule is the whole run's
        self.optimizers = paced(recipe, settings)
        self.step = 0
        self.tokens = 0  # learnt from, all steps together
        self._said = time.perf_counter()

    @property
    def asked(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        of_recipe = {f"{self.recipe.method}.{name}": value for name, value in self.recipe.describe().items()}
        asked = {**self.settings.to_dict(), **of_recipe, "method": self.recipe.method, "data": self.about.get("data")}
        plain: dict[str, Any] = json.loads(json.dumps(asked))
        return plain

    def run(self) -> Path:
        """Train to the end, from the newest checkpoint if there is one; the last checkpoint."""
        self._resume()
        done: Path | None = None
        steps = self._packs()
        while self.step < self.stop_after:
            outcome = self._advance(next(steps))
            self._log(outcome)
            done = self._save_if_due()
        if done is None:  # it had been finished before
            done = checkpoint.checkpoints(self.out / CHECKPOINTS)[-1]
        if self.processes.is_first:
            checkpoint.publish(done, self.out)
        return done

    def _packs(self) -> Iterator[list[tuple[int, list[Sample]]]]:
        """This process's packs, numbered, of each step still to come."""
        s = self.settings
        packs = enumerate(batches(self.samples, s.batch_tokens, s.seed))
        steps = (list(itertools.islice(packs, s.accumulate)) for _ in itertools.count())
        return (self.processes.share(step) for step in itertools.islice(steps, self.step, None))

    def _advance(self, packs: list[tuple[int, list[Sample]]]) -> "StepOutcome":
        s = self.settings
        for _, optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        total = StepOutcome(self.recipe.depth)
        for number, pack in packs:
            batch = self.features(self.rewrite(pack, number))
            with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, enabled=s.bf16):
                outcome = self.recipe.learn(batch)
            if outcome.tokens:
                outcome.loss.backward()  # type: ignore[no-untyped-call]
            total.add(outcome)
        parameters = list(self.recipe.parameters.values())
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        self.processes.sum(gradients)
        total.counts, (total.loss, total.tokens) = self.processes.sum_numbers(total.counts, total.loss, total.tokens)
        if not total.tokens:
            logger.warning("step %d taught nothing: none of its tokens can be learnt from", self.step)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.div_(max(1.0, total.tokens))
        norm = torch.nn.utils.clip_grad_norm_(parameters, s.clip)
        if not norm.isfinite():
            raise PacelineError(f"step {self.step}: the gradient is not finite", hint="lower --lr, or leave out --bf16")
        total.norm = float(norm)
        for factor, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * s.rate(self.step)
            if total.tokens:
                optimizer.step()
        self.step += 1
        self.tokens += int(total.tokens)
        return total

    def _log(self, outcome: "StepOutcome") -> None:
        s = self.settings
        line = {"step": self.step, "rate": s.rate(self.step - 1), **outcome.report(), "tokens": self.tokens}
        if not self.processes.is_first:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        now = time.perf_counter()
        if now - self._said > 5 or self.step == s.steps:
            self._said = now
            logger.info(
                "step %d of %d · loss %.3f · simulated acceptance length %.2f · %d tokens",
                *(self.step, s.steps, line["loss"], line["simulated_acceptance_length"], self.tokens),
            )

    def _save_if_due(self) -> Path | None:
        s = self.settings
        last = self.step == s.steps
        if not last and self.step != self.stop_after and not (s.save_every and self.step % s.save_every == 0):
            return None
        folder = self.out / CHECKPOINTS
        place = folder / f"step-{self.step:07d}"
        if self.processes.is_first:
            provenance = {**self.about, "settings": self.asked, "step": self.step, "tokens": self.tokens}
            state = {
                "asked": self.asked,
                "step": self.step,
                "tokens": self.tokens,
                "parameters": {name: p.detach() for name, p in self.recipe.parameters.items()},
                "optimizers": [optimizer.state_dict() for _, optimizer in self.optimizers],
            }
            place = checkpoint.save(folder, self.step, self.recipe, state, provenance)
            if self.evaluate is not None and (last or (s.evaluate_every and self.step % s.evaluate_every == 0)):
                self._evaluate(place)
        self.processes.wait()
        return place

    def _evaluate(self, place: Path) -> None:
        assert self.evaluate is not None
        found = {"step": self.step, **self.evaluate(place)}
        write_json(place / EVALUATION, found)
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        logger.info("step %d · %s", self.step, " · ".join(f"{k} {v}" for k, v in found.items() if k != "step"))

    def _resume(self) -> None:
        state = checkpoint.load(self.out / CHECKPOINTS, self.asked)
        if state is None:
            return
        with torch.no_grad():
            for name, parameter in self.recipe.parameters.items():
                parameter.copy_(state["parameters"][name])
        for (_, optimizer), held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.step, self.tokens = state["step"], state["tokens"]
        self._cut_log()
        logger.info("going on after step %d", self.step)

    def _cut_log(self) -> None:
        """Steps after the checkpoint will be made, and written, again."""
        log = self.out / LOG
        if self.processes.is_first and log.exists():
            lines = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            log.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step), encoding="utf-8")


class StepOutcome:
    """Sums over the packs of a step."""

    def __init__(self, depth: int) -> None:
        self.loss = 0.0
        self.tokens = 0.0
        self.counts = torch.zeros(depth, 3, dtype=torch.float64)
        self.norm = 0.0

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        self.tokens += outcome.tokens
        self.counts += outcome.counts

    def report(self) -> dict[str, Any]:
        """Loss a token; how often draft and target agree at each depth; the acceptance length that this amounts to."""
        agreed, overlap = ((self.counts[:, i] / self.counts[:, 0].clamp(min=1)).tolist() for i in (1, 2))
        return {
            "loss": self.loss / max(1.0, self.tokens),
            "gradient_norm": self.norm,
            "agreement": [round(value, 4) for value in agreed],
            "overlap": [round(value, 4) for value in overlap],
            "simulated_acceptance_length": 1 + sum(itertools.accumulate(agreed, lambda a, b: a * b)),
        }
