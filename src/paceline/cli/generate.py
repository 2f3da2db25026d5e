"""`paceline generate`: answer one prompt, streaming, and say how speculation went."""

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams
from paceline.drafters.config import MAX_DRAFT_TOKENS, SpeculativeConfig
from paceline.errors import PacelineError

SAMPLING = SamplingParams()
METHOD_NAMES = ("none", "ngram", "suffix", "draft_model")  # the registry itself would import torch


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer or complete a prompt",
        description="Answer a prompt. The text goes to stdout as it comes, everything else to stderr.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; `-` or nothing reads it from stdin")
    add("--file", "-f", metavar="PATH", help="read the prompt from a file")
    add("--system", metavar="TEXT", help="system message of the chat")
    add("--raw", action="store_true", help="complete the prompt as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object at the end in place of the text")
    add("--stats", action="store_true", help="print a line of statistics at the end")
    add_model_options(parser)
    add_speculation_options(parser)
    add_sampling_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    where = "a name of `paceline models`, a folder, a GGUF file or a Hub id"
    add("--model", "-m", default="smollm2-135m", metavar="NAME", help=f"{where} (default: %(default)s)")
    add("--dtype", default="auto", help="auto (the model's own), bf16, fp32 or fp64")
    add("--device", default="auto", help="auto (cuda where there is one), cpu, cuda, cuda:1 …")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    add("--max-context", type=int, metavar="N", help="positions to allow (default: the model's own)")


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("speculation", "how soon the tokens come; never which").add_argument
    default = "default: draft_model where --draft-model is given, else ngram"
    add("--method", metavar="NAME", help=f"{', '.join(METHOD_NAMES)}; several in order: suffix,draft_model ({default})")
    add("--draft-model", metavar="NAME", help="a smaller model with the same vocabulary")
    bounds = f"0 (plain decoding) to {MAX_DRAFT_TOKENS}; default: the method's own"
    add("--num-draft-tokens", "-k", type=int, metavar="K", help=f"tokens drafted a step, {bounds}")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=SAMPLING.temperature, metavar="T",
        help="0 takes the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-p", type=float, default=SAMPLING.top_p, metavar="P",
        help="keep the fewest likeliest tokens that hold this share of the probability")  # fmt: skip
    add("--top-k", type=int, default=SAMPLING.top_k, metavar="K", help="keep the K likeliest tokens; 0 is off")
    add("--min-p", type=float, default=SAMPLING.min_p, metavar="P",
        help="drop tokens less likely than this fraction of the likeliest")  # fmt: skip
    add("--seed", type=int, metavar="N", help="the same seed, the same tokens (default: drawn, and shown)")
    add("--max-tokens", "-n", type=int, default=256, metavar="N",
        help="length of the answer (default: %(default)s)")  # fmt: skip
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end the answer before this text; may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    # What can be refused is refused before anything slow is imported or loaded.
    params = sampling_params(args)
    speculation = speculative_config(args)
    prompt = read_prompt(args)
    from paceline.cli.generation import generate

    return generate(args, prompt, params, speculation)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
    )


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig:
    """The method asked for, or the one that the other options imply. Contradictions are refused."""
    methods = (args.method or ("ngram" if args.draft_model is None else "draft_model")).split(",")
    count = args.num_draft_tokens
    if count is not None and not 0 <= count <= MAX_DRAFT_TOKENS:
        raise PacelineError(
            f"--num-draft-tokens is {count}; it must be a whole number from 0 to {MAX_DRAFT_TOKENS}",
            hint="0 is plain decoding",
        )
    takes_model = "draft_model" in methods
    if args.draft_model is not None and not takes_model and set(methods) <= set(METHOD_NAMES):
        raise PacelineError(
            f"--draft-model {args.draft_model} contradicts --method {args.method}, which uses no second model",
            hint="leave one of the two out",
        )
    if args.draft_model is None and takes_model:
        raise PacelineError(
            "--method draft_model needs a draft model",
            hint="name one with --draft-model, for instance qwen2.5-coder-0.5b for qwen2.5-coder-1.5b",
        )
    if methods == ["none"] and count:
        raise PacelineError(
            f"--num-draft-tokens {count} contradicts --method none, which drafts nothing",
            hint="leave one of the two out",
        )
    values: dict[str, Any] = {"method": methods[0]} if len(methods) == 1 else {"methods": methods}
    if count is not None:
        values["num_draft_tokens"] = count
    if args.draft_model is not None:
        values["draft_model"] = args.draft_model
    return SpeculativeConfig.from_dict(values)


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from its argument, a file or stdin; of the latter two a last line end is dropped."""
    if args.file is not None and args.prompt is not None:
        raise PacelineError("there are two prompts: an argument and --file", hint="leave one of the two out")
    if args.raw and args.system is not None:
        raise PacelineError("--system contradicts --raw, which has no chat", hint="leave one of the two out")
    try:
        if args.file is not None:
            prompt = Path(args.file).read_text(encoding="utf-8").removesuffix("\n")
        elif args.prompt in (None, "-"):
            if sys.stdin is None or sys.stdin.isatty():
                raise PacelineError("there is no prompt", hint='paceline generate "…", --file PATH, or a pipe')
            prompt = sys.stdin.read().removesuffix("\n")
        else:
            prompt = args.prompt
        for text in (prompt, args.system or "", *args.stop):
            text.encode()  # a command line that is not UTF-8 arrives as lone surrogates
    except UnicodeError as error:
        raise PacelineError(
            "the prompt, system message or stop text is not UTF-8", hint="convert it first, for instance with iconv"
        ) from error
    if not prompt.strip():
        raise PacelineError("the prompt is empty", hint='give some text: paceline generate "…"')
    return prompt
