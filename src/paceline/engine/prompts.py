"""What a user may give as a prompt or a conversation. Raises PacelineError for anything else."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.values import elements, shown

Prompt = str | Sequence[int] | Mapping[str, Any]  # or an array of whole numbers
Message = Mapping[str, Any]


def listed(prompts: Any) -> list[Any]:
    """One prompt or several: a list of ids is one, and so is an array of one dimension."""
    prompts = _plain(prompts)
    if (found := elements(prompts)) is None:
        return [prompts]
    several = [_plain(prompt) for prompt in found]
    return [prompts] if several and all(isinstance(item, int) for item in several) else several


def text_of(prompt: Any) -> str | None:
    """The text of a prompt that is one, also of {"prompt": text}."""
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise PacelineError(
                f"a prompt has the keys {list(prompt)}", hint='it needs "prompt" or "prompt_token_ids", one of them'
            )
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def token_ids(prompt: Any) -> list[int]:
    """The ids of a prompt that has no text. What the list holds is for the engine to check."""
    if isinstance(prompt, Mapping):
        (prompt,) = prompt.values()
    prompt = _plain(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray | memoryview):
        raise PacelineError(
            f"a prompt is of type {type(prompt).__name__}", hint="give text, or a list or an array of token ids"
        )
    return [_plain(token) for token in prompt]


def check_conversation(messages: Any) -> None:
    """A list of one message or more."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise PacelineError(
            f"a conversation is {shown(messages)}; it must be a list of messages",
            hint='[{"role": "user", "content": "…"}]',
        )
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise PacelineError(
                f"a message's content is {shown(content)}; it must be text", hint="join parts to one text"
            )
    if not messages:
        raise PacelineError("the conversation is empty", hint="give at least one message")


def _plain(value: Any) -> Any:
    """An array or one of its numbers as Python's own; the bytes behind a memoryview are no ids."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value
