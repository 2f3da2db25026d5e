"""A conversation as tokens: which are the assistant's, and where a user's turn begins.

Templates that mark the assistant's text for training are few, so nothing is asked of them: what is rendered before an
answer (with the opening of the answer) and up to its end are prefixes of the whole, and what lies between is its own.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.models.tokenizer import Tokenizer

Span = tuple[int, int]
"""Token positions [start, stop)."""
_MARK = "USERTURNGOESHERE"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation's token ids, and the spans of them that the assistant wrote, its end-of-turn token included."""

    token_ids: tuple[int, ...]
    assistant: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """How a user's turn begins, as token ids, and what ends it."""

    prompt_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], end_ids: Set[int] = frozenset()
) -> Encoded:
    """Token ids and assistant spans of a conversation that has its answers; a span ends with the first of `end_ids`.

    An earlier answer that the template writes otherwise once another follows (without its reasoning, say) is not
    counted as the assistant's. Raises PacelineError if no token is.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    lead = len(ids) - len(encoding.ids)  # a BOS that the template leaves to the tokenizer
    spans = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or index == 0:
            continue
        before = tokenizer.render_chat(messages[:index], add_generation_prompt=True)
        upto = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
        if text.startswith(upto) and upto.startswith(before):
            inside = [lead + i for i, (a, b) in enumerate(encoding.offsets) if len(before) <= a < b <= len(upto)]
            if inside:
                spans.append(_until_end(ids, (inside[0], inside[-1] + 1), end_ids))
    if not spans:
        raise PacelineError(
            "no token of the conversation is the assistant's",
            hint="its answers must follow the prompt as the chat template opens one",
        )
    return Encoded(tuple(ids), tuple(spans))


def _until_end(ids: Sequence[int], span: Span, end_ids: Set[int]) -> Span:
    start, stop = span
    end = next((i for i in range(start, stop) if ids[i] in end_ids), stop - 1)
    return start, end + 1


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """The opening of a conversation whose first words are the user's, for a model to write them itself."""
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise PacelineError(
            "the chat template does not write the user's text once, as it is", hint="give prompts: --prompts FILE"
        )
    closing = tokenizer.encode(after.strip(), add_special=False)
    special = bool(closing) and not tokenizer.decode(closing[:1])
    return UserTurn(
        prompt_ids=tuple(tokenizer.encode(before, add_special=True)),
        stop_token_ids=tuple(closing[:1]) if special else (),
        stop=() if special or not after.strip() else (after.strip(),),
    )
