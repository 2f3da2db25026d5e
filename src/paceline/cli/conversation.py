"""The conversation behind `paceline chat`: one `LLM`, whose prefix cache keeps the rows of earlier turns."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from paceline.cli.answering import Answer, Interrupts, answer, plural, statistics_parts, write
from paceline.cli.loading import banner, load, measuring_progress, method_name, require_tokenizer
from paceline.cli.main import report, show_traceback
from paceline.cli.options import (
    DRAFT_OPTIONS,
    check_method,
    check_num_draft_tokens,
    draft_options,
    in_option_names,
    needed_model,
    rule_of,
)
from paceline.core.params import SamplingParams
from paceline.core.rng import draw_seed
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find
from paceline.engine.engine import RequestOptions
from paceline.engine.llm import LLM
from paceline.engine.statistics import SpeculationStatistics
from paceline.errors import PacelineError
from paceline.models.shipped import shipped_methods
from paceline.values import one_line, whole_of

HELP = {
    "/stats": "how the last answer and the whole chat went",
    "/method NAME [K]": "draft with another method, K tokens a step",
    "/reset": "begin a new conversation",
    "/system TEXT": "another system message; without TEXT, none",
    "/help": "this list; a line that begins with a space is never a command",
    "/quit": "leave; so do Ctrl-D, and Ctrl-C at an empty prompt",
}
MAX_SEED = 2**64


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and whether a method drafted for it."""

    answer: Answer
    drafting: bool


def open_chat(args: argparse.Namespace, params: SamplingParams, speculation: SpeculativeConfig) -> "Chat":
    """Load what the options name, and say what runs."""
    model = load(args)
    if not require_tokenizer(model).has_chat_template:
        raise PacelineError(
            f"model {model.name} has no chat template, so it cannot chat",
            hint="`paceline generate --raw` completes a prompt without one",
        )
    llm = LLM(model, speculation, max_num_seqs=1, progress=measuring_progress())
    params = replace(params, seed=draw_seed() if params.seed is None else params.seed)
    context = f"context: {plural(llm.engine.config.max_model_len, 'token')}"
    for line in (*model.notes, f"{banner(model, speculation, params, rule_of(args))} · {context}"):
        print(line, file=sys.stderr)
    if sys.stdin.isatty():
        print("/help lists the commands, /quit leaves", file=sys.stderr)
    return Chat(llm, params, RequestOptions(rule=rule_of(args)), args.system, draft_options(args))


class Chat:
    """Takes lines: a command, or the next message. `drafting`: keys of speculative_config for whoever takes them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        options: RequestOptions,
        system: str | None,
        drafting: Mapping[str, Any],
    ) -> None:
        self.ended = False
        self._llm, self._params, self._options = llm, params, options
        self._system, self._drafting = system, drafting
        self._speculation = llm.speculative_config
        self._messages: list[dict[str, str]] = []
        self._turns: list[Turn] = []

    def take(self, line: str, is_command: bool = False) -> None:
        """Do what a line says. What is wrong with it is said in a line or two, and the chat goes on."""
        try:
            if is_command:
                self._command(line)
            elif line:
                self._say(line)
        except PacelineError as error:
            show_traceback()
            error = in_option_names(error)
            report(str(error), error.hint)

    # A message

    def _say(self, text: str) -> None:
        """Answer a message. It joins the conversation with its answer, an interrupted one too, or not at all."""
        messages = [*self._messages, {"role": "user", "content": text}]
        with Interrupts() as interrupts:
            prompt_ids = self._llm.chat_ids([*self._system_messages(), *messages])
            self._check_room(len(prompt_ids))
            done = answer(self._llm.engine, prompt_ids, self._own_params(), self._options, write, interrupts)
            print(flush=True)
        self._turns.append(Turn(done, self._speculation.drafts))
        if done.interrupted:
            words = f"after {plural(done.num_tokens, 'token')}" if done.num_tokens else "before it began"
            print(f"the answer was interrupted {words}", file=sys.stderr)
        elif done.finish_reason == "length":
            self._tell_length(len(prompt_ids) + done.num_tokens, done.num_tokens)
        if done.num_tokens:
            self._messages = [*messages, {"role": "assistant", "content": done.completion.text}]

    def _system_messages(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _own_params(self) -> SamplingParams:
        """Each turn has its own seed, and so its own noise: the chat's, plus the number of turns before it."""
        assert self._params.seed is not None
        return replace(self._params, seed=(self._params.seed + len(self._turns)) % MAX_SEED)

    def _check_room(self, num_tokens: int) -> None:
        room = self._llm.engine.config.max_model_len
        if num_tokens >= room:
            raise PacelineError(
                f"the conversation has {num_tokens} tokens with this message, and the context holds {room}, "
                "one of them for the answer",
                hint="/reset begins a new conversation",
            )

    def _tell_length(self, total: int, num_tokens: int) -> None:
        room = self._llm.engine.config.max_model_len
        full = f"the context of {room} tokens is full: /reset begins a new conversation"
        print(full if total >= room else f"cut at --max-tokens {num_tokens}", file=sys.stderr)

    # A command

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/stats":
                self._stats()
            case "/method":
                self._method(rest.split())
            case "/reset":
                self._messages, self._turns = [], []
                print("a new conversation", file=sys.stderr)
            case "/system":
                self._system = rest or None
                print("the system message is set" if rest else "there is no system message", file=sys.stderr)
            case "/help":
                for usage, what in HELP.items():
                    print(f"{usage:18}{what}", file=sys.stderr)
            case "/quit":
                self.ended = True
            case _:
                near = get_close_matches(word, [usage.split()[0] for usage in HELP], n=1)
                hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
                print(f"unknown command {word}: {hint}", file=sys.stderr)

    def _stats(self) -> None:
        if not self._turns:
            print("nothing was answered yet", file=sys.stderr)
            return
        print(f"last answer: {describe(self._turns[-1:])}", file=sys.stderr)
        print(f"whole chat: {plural(len(self._turns), 'answer')} · {describe(self._turns)}", file=sys.stderr)
        report = self._llm.policy_report() if self._speculation.method == "auto" else None
        if report is not None:
            print(f"auto: {report['summary']}", file=sys.stderr)

    def _method(self, words: Sequence[str]) -> None:
        if not words:
            print(f"method: {method_name(self._speculation)}", file=sys.stderr)
            return
        speculation = self._configure(words)
        self._options = replace(
            self._options,
            speculative=speculation.drafts,
            method=self._llm.add_method(speculation),
            num_speculative_tokens=speculation.num_speculative_tokens,
        )
        self._speculation = speculation
        print(f"method: {method_name(speculation)}", file=sys.stderr)

    def _configure(self, words: Sequence[str]) -> SpeculativeConfig:
        method = words[0]
        if "," in method:
            raise PacelineError(
                f"/method takes one method, and {method} are several",
                hint=f"begin with paceline chat --method {method}",
            )
        check_method(method)
        values: dict[str, Any] = {"method": method}
        needs_model, model = find(method).needs_model, self._drafting.get("model")
        if len(words) > 1:
            values["num_speculative_tokens"] = draft_count(method, words[1:])
        if needs_model and model is None and method not in shipped_methods():
            raise PacelineError(
                f"method {method} needs {needed_model(method)}", hint="begin with paceline chat --draft-model NAME"
            )
        # what the command line said holds for whoever takes it; for `auto`, whose members hang on the model, with one
        with_model = needs_model or (method == "auto" and model is not None)
        kept = set(DRAFT_OPTIONS) if with_model else set() if method == "auto" else {"draft_confidence_threshold"}
        values |= {key: self._drafting[key] for key in kept & self._drafting.keys() & find(method).options}
        return SpeculativeConfig.from_dict(values)


def draft_count(method: str, words: Sequence[str]) -> int:
    """K of `/method NAME K`."""
    count = whole_of(words[0])
    if len(words) > 1 or count is None:
        given = one_line(" ".join(words), 60)
        raise PacelineError(f"/method {method} {given}: K is not a whole number", hint="/method NAME [K]")
    check_num_draft_tokens("K", count)
    if method == "none" and count:
        raise PacelineError(f"K {count} contradicts method none, which drafts nothing", hint="leave K out")
    return count


def describe(turns: Sequence[Turn]) -> str:
    """Statistics of some answers together."""
    speculation = SpeculationStatistics()
    for turn in turns:
        speculation.merge(turn.answer.completion.speculation)
    usages = [turn.answer.output.usage for turn in turns]
    cached, prompt = sum(usage.cached_tokens for usage in usages), sum(usage.prompt_tokens for usage in usages)
    parts = statistics_parts(
        sum(turn.answer.num_tokens for turn in turns),
        sum(turn.answer.decode_s for turn in turns),
        speculation,
        any(turn.drafting for turn in turns),
    )
    return " · ".join((*parts, f"{cached} of {prompt} prompt tokens cached"))
