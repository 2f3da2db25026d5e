"""`LLM`: a model, ready to answer. vLLM's names; one engine underneath, shared by all calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find, names
from paceline.engine.arguments import loaded, one_each, speculative_config_of
from paceline.engine.engine import Engine, EngineConfig, RequestOptions
from paceline.engine.methods import add_method
from paceline.engine.outputs import RequestOutput, Update
from paceline.engine.prompts import Message, Prompt, check_conversation, listed, text_of, token_ids
from paceline.engine.request import check_flag, check_kind, check_whole
from paceline.engine.room import affordable_blocks, model_len
from paceline.errors import PacelineError
from paceline.models.home import Progress, silent
from paceline.models.shipped import shipped_head
from paceline.models.tokenizer import Tokenizer
from paceline.ops.attention import BLOCK
from paceline.values import shown


class LLM:
    """Generates with `model`: a name (see `load_model`), a LoadedModel, or transformers' model, or (model, tokenizer).

    speculative_config: vLLM's keys ({"method": …, "model": …, "num_speculative_tokens": …}), or a method's name alone;
        None is "auto": whatever pays. "none" is plain decoding.
    max_model_len: tokens of a request, prompt and answer; None: what the model and the memory allow.
    max_num_seqs: requests (choices) that run at once; others wait in order.
    kv_cache_memory_bytes: for the KV blocks of all requests and the prefix cache; None: a quarter of what is free.
    Raises PacelineError, one line, for whatever cannot be.
    """

    def __init__(
        self,
        model: Any,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        progress: Progress = silent,
    ) -> None:
        for name, setting in (
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("kv_cache_memory_bytes", kv_cache_memory_bytes),
        ):
            if setting is not None or name.startswith("max_num"):
                check_whole(name, setting, 1)
        check_flag("enable_prefix_caching", enable_prefix_caching)
        check_kind("dtype", dtype, str, 'a precision, "bf16" say, or "auto"')
        check_kind("device", device, str | torch.device | None, 'a device, "cpu" say, or None')
        if device == "":
            raise PacelineError("device is empty", hint='leave it out, or "cpu"')
        check_kind("progress", progress, Callable, "a function of what is done, how much, and of how much")
        config = speculative_config_of("auto" if speculative_config is None else speculative_config)
        config.check_used()
        self.model = loaded(model, dtype, None if device is None else str(device), progress)
        self.speculative_config = config
        blocks = affordable_blocks(self.model, kv_cache_memory_bytes)
        length = model_len(self.model.config, max_model_len, blocks)
        # What all seats can use, and as much again for prompts that are kept.
        seats = max_num_seqs * -(-length // BLOCK)
        blocks = min(blocks, 2 * seats if enable_prefix_caching else seats)
        engine_config = EngineConfig(
            max_model_len=length,
            num_kv_blocks=blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_cache_blocks=blocks if enable_prefix_caching else 0,
        )
        self.engine = Engine(
            self.model.decoder,
            engine_config,
            method=config.method if config.drafts else "none",
            tokenizer=self.model.tokenizer,
        )
        self._progress = progress
        self._methods: dict[str, SpeculativeConfig] = {}
        if config.drafts:
            self.add_method(config)
        self._news: list[Update] = []  # of the last step, until they are with those who wait for them
        self._arrived: dict[int, list[Update]] = {}  # by request that somebody is waiting for
        self._unwanted: list[int] = []  # requests whose call is over

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises PacelineError if it has none."""
        if self.model.tokenizer is None:
            raise PacelineError(
                f"model {self.model.name} has no tokenizer",
                hint="give token ids, or put tokenizer.json into its folder",
            )
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts together; outputs in the order of the prompts.

        A prompt is text, token ids (a list or an array), or {"prompt": text} or {"prompt_token_ids": ids}. One set of
        parameters for all, or one each. If a request cannot be, PacelineError is raised before any has begun.
        """
        prompts = listed(prompts)
        params = one_each("sampling_params", sampling_params, SamplingParams(), SamplingParams, len(prompts))
        params = [self._with_token_ids(each) for each in params]
        chosen = one_each("options", options, RequestOptions(), RequestOptions, len(prompts))
        ids = [self._encode(prompt) for prompt in prompts]
        for prompt_ids, own_params, own_options in zip(ids, params, chosen, strict=True):
            self._ensure_method(own_options)
            self.engine.check_request(prompt_ids, own_params, own_options)
        texts = [text_of(prompt) for prompt in prompts]
        numbers: list[int] = []
        try:
            for request in zip(ids, params, chosen, texts, strict=True):
                self._add(numbers, *request)
            finished = {number: self._last_update(number).output for number in numbers}
        finally:
            self._leave(numbers)
        return [output for number in numbers if (output := finished[number]) is not None]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[Update]:
        """Answer one prompt, update by update: text as it settles. The last update carries the whole output.

        The request begins with the first `next`; closing the iterator cancels it. Several streams run together.
        """
        (options,) = one_each("options", options, RequestOptions(), RequestOptions, 1)
        (params,) = one_each("sampling_params", sampling_params, SamplingParams(), SamplingParams, 1)
        params = self._with_token_ids(params)
        ids = self._encode(prompt)
        self._ensure_method(options)
        self.engine.check_request(ids, params, options)
        return self._updates(ids, params, options, text_of(prompt))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": …, "content": …}, …]) or several, as the model's chat template writes it.

        Of a conversation that goes on, earlier turns are found in the prefix cache.
        """
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        conversations: Any = messages if several else [messages]
        return self.generate([self.chat_ids(each) for each in conversations], sampling_params, options)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins."""
        check_conversation(messages)
        return self.tokenizer.apply_chat_template(messages)

    def add_method(self, config: SpeculativeConfig | Mapping[str, Any] | str) -> str:
        """Load another drafting method, for requests that name it in their options; its name.

        One that is loaded keeps its drafter; its K may change. Raises PacelineError if other settings would.
        """
        config = speculative_config_of(config)
        name = config.method
        if name == "none":
            config.check_options()
            return name
        if config.draft_cache_tokens is None and _has_draft_cache(config):
            config = replace(config, draft_cache_tokens=self.engine.config.num_kv_blocks * BLOCK)
        known = self._methods.get(name)
        if known is not None and replace(known, num_speculative_tokens=config.num_speculative_tokens) != config:
            raise PacelineError(
                f"method {shown(name)} is loaded already, with other settings", hint="build another LLM to change them"
            )
        if known is None:
            add_method(self.engine, self.model, config, self._progress)
        else:
            drafter = self.engine.speculation.drafters[name]
            self.engine.add_method(name, drafter, config.num_speculative_tokens)
        self._methods[name] = config
        return name

    def policy_report(self) -> dict[str, Any] | None:
        """What `auto` did so far, and why, over all requests: "summary" is a line. None where it is not loaded."""
        return self.engine.policy.report()

    def reset_prefix_cache(self) -> None:
        """Forget all kept prompts and answers."""
        self.engine.reset_prefix_cache()

    def _with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """A bad word is bad at a text's start and after a space: tokens tell the two apart."""
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        return params.with_bad_words(
            lambda text: [self.tokenizer.encode(form, add_special=False) for form in dict.fromkeys((text, f" {text}"))]
        )

    def _ensure_method(self, options: RequestOptions) -> None:
        """Methods that need no model of their own, or have a head in the package, are loaded when first asked for."""
        name = options.method
        if name in (None, "none", *self._methods) or name not in names():
            return
        if find(name).needs == "nothing" or shipped_head(name, self.model) is not None:
            self.add_method({"method": name})

    def _add(
        self, numbers: list[int], prompt_ids: list[int], params: SamplingParams, options: RequestOptions,
        text: str | None,
    ) -> None:  # fmt: skip
        self._leave([])  # what an interruption left
        numbers.append(self.engine.add_request(prompt_ids, params, options, text))
        self._arrived[numbers[-1]] = []

    def _updates(
        self, prompt_ids: list[int], params: SamplingParams, options: RequestOptions, text: str | None
    ) -> Iterator[Update]:
        numbers: list[int] = []
        try:
            self._add(numbers, prompt_ids, params, options, text)
            while True:
                update = self._next_update(numbers[0])
                if update.text or update.token_ids or update.finish_reason is not None:
                    yield update
                if update.output is not None:
                    return
        finally:
            self._leave(numbers)

    def _next_update(self, number: int) -> Update:
        """Step until there is news of a request; that of others is kept for those who wait for it."""
        while not self._arrived[number]:
            if not self._news:
                if not self.engine.has_unfinished:
                    raise RuntimeError(f"request {number} is gone: the engine was told to cancel it")
                self._news += self.engine.step()
            while self._news:
                update = self._news[0]
                arrived = self._arrived.get(update.request_id, [])  # of nobody: it is dropped
                n = len(arrived)
                arrived[n:], self._news[:1] = [update], []  # at once: an interruption loses none and doubles none
        return self._arrived[number].pop(0)

    def _last_update(self, number: int) -> Update:
        while (update := self._next_update(number)).output is None:
            pass
        return update

    def _leave(self, numbers: Sequence[int]) -> None:
        self._unwanted += numbers
        while self._unwanted:
            self.engine.cancel(self._unwanted[-1])  # unless it has ended
            self._arrived.pop(self._unwanted[-1], None)
            self._unwanted.pop()

    def _encode(self, prompt: Prompt) -> list[int]:
        text = text_of(prompt)
        return token_ids(prompt) if text is None else self.tokenizer.encode(text, add_special=True)


def _has_draft_cache(config: SpeculativeConfig) -> bool:
    if config.method == "auto" and config.methods is None:
        return config.model is not None
    members = config.methods or (config,)
    known = names()
    return any("draft_cache_tokens" in find(m.method).options for m in members if m.method in known)
