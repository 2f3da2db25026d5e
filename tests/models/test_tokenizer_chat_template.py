"""Chat templates: rendered as transformers renders them, and refused in one line where they cannot be."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import PacelineError
from paceline.models.chat_template import render_chat_template

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """{%- set date_string = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{{- bos_token }}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- if loop.first %}{{- header + "Today: " + date_string + '<|eot_id|>' }}{% endif %}
    {{- header + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA = """{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
{{- ns.index }}
"""

WITH_TOOLS = """{%- if tools %}{{- tools | tojson(indent=2) }}{%- else %}{{- 'no tools ' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}"""

UNDASHED = """  {% for message in messages %}
    {% if message.role == 'user' %}
  Q: {{ message.content }}
    {% endif %}
{% endfor %}
A:"""

TEMPLATES = {
    "undashed": UNDASHED,
    "chatml": CHATML,
    "llama-3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "tools": WITH_TOOLS,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "f", "description": "<b>'é'</b> & 😊"}}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHATS = [
    [turn("user", "Hi")],
    [turn("user", " spaced \n"), turn("assistant", "'<b>' & \"é\" 😊"), turn("user", "")],
    [turn("system", "Be brief."), turn("user", "x"), turn("assistant", "y"), turn("user", "{{ z }}")],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_as_transformers(name: str, chat: int, prompt: bool) -> None:
    if name == "gemma" and chat == 2:
        pytest.skip("refused, see below")
    given = SPECIAL | {"tools": [TOOL] if chat == 1 else None}
    (expected,), _ = render_jinja_template(
        [CHATS[chat]], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **given
    )
    assert len(expected) >= 10
    assert render_chat_template(TEMPLATES[name], CHATS[chat], prompt, given) == expected


@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (GEMMA, CHATS[2], "System role not supported"),
        (GEMMA, [turn("user", "a"), turn("user", "b")], "Conversation roles must alternate"),
        (MISTRAL, [turn("tool", "a")], "Only user and assistant roles are supported!"),
        ("{% for", CHATS[0], "not valid (line 1)"),
        ("{{ nothing.at.all }}", CHATS[0], "'nothing' is undefined"),
        ("{{ messages + 1 }}", CHATS[0], "TypeError"),
        ("{{ ''.__class__.__mro__ }}", CHATS[0], "unsafe"),
        ("{% set _ = messages.append(1) %}", CHATS[0], "unsafe"),
        (CHATML, [], "no messages"),
        (CHATML, [{"content": "x"}], "message 0 has no role"),
        (CHATML, [turn("user", 7)], "content is int"),
        (CHATML, [turn("user", [{"type": "image_url", "image_url": "x"}])], "'image_url'"),
        (CHATML, [turn("user", [{"type": "text"}])], "'text'"),
        (CHATML, [turn("user", ["bare"])], "'str'"),
    ],
)
def test_refusals_are_one_line(template: str, chat: list[Any], says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        render_chat_template(template, chat, True, SPECIAL)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_content_of_every_accepted_kind(content: Any, text: str) -> None:
    chat = [turn("user", content)]
    expected = render_chat_template(CHATML, [turn("user", text)], True, SPECIAL)
    assert render_chat_template(CHATML, chat, True, SPECIAL) == expected
    assert chat == [turn("user", content)]  # left as it was
