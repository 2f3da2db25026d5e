"""Options of every command that runs a model, and the checks that need no model: nothing here imports torch."""

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from paceline.core.params import SamplingParams
from paceline.drafters.config import MAX_DRAFT_TOKENS, SpeculativeConfig
from paceline.drafters.registry import METHODS, find, names
from paceline.errors import PacelineError
from paceline.models.precision import precision_of
from paceline.models.shipped import shipped_methods
from paceline.values import one_line, shown

DEFAULTS = SamplingParams()
RULE_NAMES = ("coupled", "standard", "block", "lossy-typical")  # of a registry that would import torch; a test compares
LOSSY = "lossy-"  # before the name of a rule whose tokens are not the model's own
DTYPE_HELP = (
    "auto (the model's own; of a GGUF file: file, where there are native operators), bf16, fp32 or fp64; "
    "file: matrices computed on as the file stores them; "
    "int8, int4: made into groups of 32 (default: %(default)s)"
)
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

# Fields of SamplingParams that are options, and what to say to someone who gave a bad value.
HINTS = {
    "temperature": "0 takes the likeliest token, 1 samples as the model's own probabilities have it",
    "top_p": "1 keeps every token, 0.9 the likeliest that make up nine tenths",
    "top_k": "0 keeps every token, 40 the forty likeliest",
    "min_p": "0 keeps every token, 0.05 those at least a twentieth as likely as the likeliest",
    "presence_penalty": "0 is off, -2 to 2 is allowed",
    "frequency_penalty": "0 is off, -2 to 2 is allowed",
    "repetition_penalty": "1 is off, above 1 discourages repetition",
    "seed": "any whole number from 0 to 2^64 - 1, or leave it out to have one drawn",
    "max_tokens": "give the most tokens that the answer may have, such as 256",
    "min_tokens": "it may be at most --max-tokens",
    "stop": "give a text that ends the answer, or leave it out",
    "ignore_eos": "leave it out to end where the model ends",
    "logprobs": "0 reports the chosen tokens alone, 5 the five likeliest beside each",
}
# Keys of speculative_config that are options of their own; and, where a bad value's error has none, a hint.
DRAFT_OPTIONS = {
    "model": "--draft-model",
    "draft_dtype": "--draft-dtype",
    "draft_vocab_size": "--draft-vocab-size",
    "draft_confidence_threshold": "--draft-confidence-threshold",
}
DRAFT_HINTS = {
    "draft_vocab_size": "8192 drafts from the 8192 lowest token ids alone; leave it out to draft from all",
    "draft_confidence_threshold": "0 drafts on however unsure, 0.4 ends a draft that is wrong in six of ten cases",
}
MODEL_HINT = "name it with --draft-model, for instance qwen2.5-coder-0.5b for qwen2.5-coder-1.5b, or a head's folder"
SAMPLES = ("top_p", "top_k", "min_p", "seed")  # options that ask for sampling
_NAMES = (*HINTS, *DRAFT_OPTIONS, "max_context", "num_speculative_tokens")
_UNDERSCORED = "|".join(name for name in _NAMES if "_" in name)
_PLAIN = "|".join(("device", *(name for name in HINTS if "_" not in name)))
# A word such as `stop` is a parameter's name only where a message begins with it.
PARAMETER = re.compile(rf"(?<![\w-])(?:{_UNDERSCORED})(?!\w)|^(?:{_PLAIN})(?= )")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    where = "a name of `paceline models`, a folder, a GGUF file or a Hub id"
    add("--model", "-m", default="smollm2-135m", metavar="NAME", help=f"{where} (default: %(default)s)")
    add("--dtype", default="auto", help=DTYPE_HELP)
    add("--device", default="auto", help="auto (cuda where there is one), cpu, cuda, cuda:1 … (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    add("--max-context", type=int, metavar="N", help="positions to allow (default: the model's own)")


# fmt: off
def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    what = "how soon the tokens come; never which, under the default --rule"
    add = parser.add_argument_group("speculation", what).add_argument
    default = "default: auto, whatever pays"
    add("--method", metavar="NAME", help=f"{', '.join(method_names())}; several: suffix,draft_model ({default})")
    add("--draft-model", metavar="NAME", help="a smaller model with the same vocabulary, or a draft head")
    bounds = f"0 (plain decoding) to {MAX_DRAFT_TOKENS}; default: the method's own"
    add("--num-draft-tokens", "-k", type=int, metavar="K", help=f"tokens drafted a step, {bounds}")
    add("--draft-dtype", metavar="NAME", help="precision of the draft model or head, one of --dtype's "
        "(default: the target's; of a head beside packed matrices int8)")
    add("--draft-vocab-size", type=int, metavar="N",
        help="let the draft model draft from the N lowest token ids alone (default: all)")
    add("--draft-confidence-threshold", type=float, metavar="P",
        help="end a draft where its likeliest token, or of a draft model those of the whole draft together, have a "
        "lower probability (default: the method's own)")
    add("--rule", default="coupled", metavar="NAME",
        help="which drafts stand. coupled: the tokens of plain decoding with the same seed; standard, block: tokens "
        "with the same distribution; lossy-typical: NOT the model's tokens, nor their distribution, but whatever it "
        "finds typical of itself (default: %(default)s)")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, metavar="T",
        help="0 takes the likeliest token (default: 0, or 1 where --seed, --top-p, --top-k or --min-p is given)")
    add("--top-p", type=float, metavar="P",
        help="keep the fewest likeliest tokens that hold this share of the probability "
        f"(default: {DEFAULTS.top_p}, all)")
    add("--top-k", type=int, metavar="K", help=f"keep the K likeliest tokens (default: {DEFAULTS.top_k}, all)")
    add("--min-p", type=float, metavar="P",
        help=f"drop tokens less likely than this fraction of the likeliest (default: {DEFAULTS.min_p}, none)")
    add("--seed", type=int, metavar="N", help="the same seed, the same tokens (default: drawn, and shown)")
    add = parser.add_argument_group("penalties").add_argument
    add("--presence-penalty", type=float, metavar="X",
        help=f"taken off the logit of every token already generated (default: {DEFAULTS.presence_penalty})")
    add("--frequency-penalty", type=float, metavar="X",
        help=f"taken off once for each time it was generated (default: {DEFAULTS.frequency_penalty})")
    add("--repetition-penalty", type=float, metavar="X",
        help=f"divides the logits of tokens in prompt or answer (default: {DEFAULTS.repetition_penalty}, off)")
    add = parser.add_argument_group("length").add_argument
    add("--max-tokens", "-n", type=int, default=max_tokens, metavar="N",
        help="most tokens of an answer (default: %(default)s)")
    add("--min-tokens", type=int, metavar="N", help=f"fewest tokens of an answer (default: {DEFAULTS.min_tokens})")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end an answer before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on where the model would end")
# fmt: on


def check_model_options(args: argparse.Namespace) -> None:
    """Refuse what can be refused before anything slow is imported or loaded."""
    for option, name in (("--model", args.model), ("--draft-model", args.draft_model)):
        if name is not None and not name.strip():
            raise PacelineError(f"{option} is empty", hint="`paceline models` lists the catalog")
    precision_of(args.dtype, "--dtype")
    if DEVICE.fullmatch(args.device) is None:
        raise PacelineError(
            f"--device {one_line(args.device, 60)} is unknown", hint="one of: auto, cpu, cuda, cuda:0 …"
        )
    cores = os.cpu_count() or 1
    if args.threads is not None and not 1 <= args.threads <= cores:
        raise PacelineError(
            f"--threads is {shown(args.threads)}; it must be a whole number from 1 to {cores}, this machine's cores",
            hint="leave it out to use every core",
        )
    if args.max_context is not None and args.max_context < 1:
        raise PacelineError(
            f"--max-context is {shown(args.max_context)}; it must be 1 or more", hint="leave it out for the model's own"
        )
    if LOSSY + args.rule in RULE_NAMES:
        raise PacelineError(
            f"--rule {args.rule} is lossy: its tokens are not those of plain decoding",
            hint=f"if that is what you want, --rule {LOSSY}{args.rule}",
        )
    if args.rule not in RULE_NAMES:
        raise PacelineError(
            f"--rule {one_line(args.rule, 60)} is unknown", hint=_suggest(args.rule, RULE_NAMES, "rules")
        )


def rule_of(args: argparse.Namespace) -> str:
    """The verification rule's own name."""
    return str(args.rule).removeprefix(LOSSY)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Greedy, unless a temperature or another option that only sampling can heed is given."""
    given = {name: value for name in HINTS if (value := getattr(args, name, None)) is not None}
    for name in SAMPLES[:3]:
        if given.get("temperature") == 0 and given.get(name, getattr(DEFAULTS, name)) != getattr(DEFAULTS, name):
            raise PacelineError(
                f"{option_of(name)} {given[name]} contradicts --temperature 0, which takes the likeliest token",
                hint="leave one of the two out",
            )
    given.setdefault("temperature", 1.0 if given.keys() & set(SAMPLES) else 0.0)
    with option_names():
        return SamplingParams(**given)


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig:
    """The method asked for, or the one that the other options imply. Contradictions are refused."""
    methods = ("auto" if args.method is None else args.method).split(",")
    for method in methods:
        check_method(method)
    count = args.num_draft_tokens
    if count is not None:
        check_num_draft_tokens("--num-draft-tokens", count)
    needs_model = [method for method in methods if find(method).needs_model and method not in shipped_methods()]
    given = draft_options(args)
    for key, value in given.items():
        if not any(key in find(method).options for method in methods):
            takers = [name for name, method in METHODS.items() if key in method.options and name != "composite"]
            raise PacelineError(
                f"{DRAFT_OPTIONS[key]} {one_line(str(value), 60)} contradicts --method {args.method}, which takes none",
                hint=f"leave one of the two out; it is for {', '.join(takers)}",
            )
    if args.draft_model is None and needs_model:
        raise PacelineError(f"--method {args.method} needs {needed_model(needs_model[0])}", hint=MODEL_HINT)
    values: dict[str, Any] = {"method": methods[0]} if len(methods) == 1 else {"methods": methods}
    values |= given
    if count is not None:
        values["num_draft_tokens"] = count
    with option_names():
        config = SpeculativeConfig.from_dict(values)
        config.check_used()
    return config


def draft_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `DRAFT_OPTIONS` that were given, by their keys."""
    asked = {key: getattr(args, option[2:].replace("-", "_")) for key, option in DRAFT_OPTIONS.items()}
    return {key: value for key, value in asked.items() if value is not None}


def method_names() -> tuple[str, ...]:
    """`composite` goes by its members' names here."""
    return tuple(name for name in names() if name != "composite")


def check_method(method: str) -> None:
    if method not in (known := method_names()):
        raise PacelineError(f"unknown method {shown(method)}", hint=_suggest(method, known, "methods"))


def needed_model(method: str) -> str:
    return "a draft model" if find(method).needs == "model" else "a draft head"


def check_num_draft_tokens(name: str, count: int) -> None:
    if not 0 <= count <= MAX_DRAFT_TOKENS:
        raise PacelineError(
            f"{name} is {shown(count)}; it must be a whole number from 0 to {MAX_DRAFT_TOKENS}",
            hint="0 is plain decoding",
        )


@contextmanager
def option_names() -> Iterator[None]:
    """Errors speak of parameters; who sits at the command line has typed options, and gets a hint."""
    try:
        yield
    except PacelineError as error:
        raise in_option_names(error) from error


def in_option_names(error: PacelineError) -> PacelineError:
    message = str(error)
    first = PARAMETER.search(message)
    hint = error.hint or ({**HINTS, **DRAFT_HINTS}.get(first[0]) if first else None)
    return PacelineError(PARAMETER.sub(_option, message), hint and PARAMETER.sub(_option, hint))


def option_of(parameter: str) -> str:
    name = "num_draft_tokens" if parameter == "num_speculative_tokens" else parameter
    return "--" + name.replace("_", "-")


def _option(match: re.Match[str]) -> str:
    return option_of(match[0])


def _suggest(given: str, known: tuple[str, ...], what: str) -> str:
    near = get_close_matches(given, known, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}the {what} are {', '.join(known)}"
