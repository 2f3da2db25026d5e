"""Chat templates, rendered as transformers renders them but without its import (2 s of every start).

The environment is transformers' (`utils/chat_template_utils.py`): sandboxed, blocks trimmed, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, loop controls, the `generation` tag; a test compares the two.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from paceline.errors import PacelineError
from paceline.values import shown

_TEXT_ONLY = 'give a string, or parts {"type": "text", "text": …}'
WITHOUT_TEMPLATE = "complete a prompt without a template: --raw"


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as text. `variables`: what the template may use besides, such as `bos_token`.

    Raises PacelineError with the template's own message where it refuses the conversation.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    conversation = [_plain_message(index, message) for index, message in enumerate(messages)]
    if not conversation:
        raise PacelineError("the conversation has no messages", hint="give at least one user message")
    given = {"tools": None, "documents": None, **variables}
    try:
        compiled = _compile(template)
        return str(compiled.render(messages=conversation, add_generation_prompt=add_generation_prompt, **given))
    except TemplateSyntaxError as error:
        raise PacelineError(
            f"the chat template is not valid (line {error.lineno}): {_one_line(error)}", WITHOUT_TEMPLATE
        ) from error
    except TemplateError as error:
        raise PacelineError(
            f"the chat template refuses this conversation: {_one_line(error)}",
            hint=f"change the roles or their order as it asks, or {WITHOUT_TEMPLATE}",
        ) from error
    except Exception as error:  # a template is a program of its author's: it may fail in any way
        raise PacelineError(
            f"the chat template failed: {type(error).__name__}: {_one_line(error)}", WITHOUT_TEMPLATE
        ) from error


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one string: null is empty, text parts are joined by newlines."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PacelineError(f"message {index} has no role", hint='each message needs "role" and "content"')
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(index, message.get("content"))
    return plain


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PacelineError(f"message {index}: content is {type(content).__name__}, not text", _TEXT_ONLY)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PacelineError(
                f"message {index}: a content part of type {shown(kind)} is not supported, only text", _TEXT_ONLY
            )
        parts.append(part["text"])
    return "\n".join(parts)


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    import jinja2.ext
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; rendering passes it through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
