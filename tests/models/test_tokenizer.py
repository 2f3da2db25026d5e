"""The tokenizer wrapper: BOS exactly once, Hugging Face folders, saving, and what importing it costs."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.models.tokenizer import Tokenizer, TokenizerInfo

TEXT = [
    "Hello world, how are you? 😊 12 345\n",
    "user assistant system\nIt's déjà vu. ",
    "[INST] [/INST] <s>",
]
MESSAGES = [{"role": "user", "content": "How are you?"}]
BODY = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
TEMPLATES = {"with": "{{ bos_token }}" + BODY + PROMPT, "without": BODY + PROMPT}


def backend() -> Backend:
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def ours(add_bos: bool = True, **templates: str) -> Tokenizer:
    inner = backend()
    bos = inner.token_to_id("<s>")
    info = TokenizerInfo(
        model_name="tiny",
        vocab_size=inner.get_vocab_size(),
        bos_id=bos,
        eos_id=bos + 1,
        prefix_ids=(bos,) if add_bos else (),
        chat_templates=templates,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    return Tokenizer(inner, info)


def hf_folder(folder: Path, add_bos: bool = True, bos: bool = True, chat_template: Any = None) -> Path:
    """A folder as Hugging Face keeps it: tokenizer.json with a post-processor, and tokenizer_config.json."""
    inner = backend()
    if add_bos:
        pair = ("<s>", inner.token_to_id("<s>"))
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": 512}
    if bos:
        config["bos_token"] = "<s>"
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# --- BOS ---


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_exactly_once_in_a_chat(template: str, add_bos: bool) -> None:
    tokenizer = ours(add_bos, default=TEMPLATES[template])
    encoded = tokenizer.apply_chat_template(MESSAGES)
    expected = 1 if add_bos or template == "with" else 0
    assert encoded.count(tokenizer.bos_id) == expected
    assert encoded[:1] == [tokenizer.bos_id][:expected] or expected == 0
    text = "user: How are you?\nassistant: "
    assert tokenizer.decode(encoded) == text


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("text", ["Hello", "<s>Hello", "", "<s>"])
def test_bos_exactly_once_in_a_prompt(add_bos: bool, text: str) -> None:
    tokenizer = ours(add_bos)
    encoded = tokenizer.encode(text, add_special=True)
    assert encoded.count(tokenizer.bos_id) == int(add_bos or text.startswith("<s>"))
    assert tokenizer.encode(text, add_special=False).count(tokenizer.bos_id) == text.count("<s>")


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_folder_encodes_as_transformers(tmp_path: Path, add_bos: bool, bos: bool) -> None:
    folder = hf_folder(tmp_path, add_bos and bos, bos, TEMPLATES["without"])
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_hf_folder(folder)
    assert tokenizer.bos_id == reference.bos_token_id and tokenizer.eos_id == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)
    for text in [*TEXT, "", "a</s>b"]:
        if not text.startswith("<s>"):
            assert tokenizer.encode(text, add_special=True) == reference(text)["input_ids"], text
        plain = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special=False) == plain
        assert tokenizer.decode(plain) == reference.decode(plain, skip_special_tokens=True)
    strings = tokenizer.token_strings()
    assert strings == reference.convert_ids_to_tokens(list(range(len(reference))))


@pytest.mark.parametrize("add_bos", [True, False])
def test_chat_ids_are_transformers_when_the_template_writes_bos(tmp_path: Path, add_bos: bool) -> None:
    folder = hf_folder(tmp_path, add_bos, True, TEMPLATES["with"])
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_hf_folder(folder).apply_chat_template(MESSAGES) == expected


def test_a_model_without_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_folder(hf_folder(tmp_path, add_bos=False, bos=False))
    assert tokenizer.bos_id is None
    assert tokenizer.encode("Hello", add_special=True) == tokenizer.encode("Hello", add_special=False)


# --- where a chat template may lie ---


def test_no_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_folder(hf_folder(tmp_path), "tiny-base")
    assert not tokenizer.has_chat_template
    with pytest.raises(PacelineError, match="model tiny-base has no chat template") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert "--raw" in str(caught.value.hint)
    assert tokenizer.encode("still completes", add_special=True)


def test_template_in_its_own_file(tmp_path: Path) -> None:
    (hf_folder(tmp_path) / "chat_template.jinja").write_text("own file " + PROMPT)
    assert Tokenizer.from_hf_folder(tmp_path).render_chat(MESSAGES) == "own file assistant: "


def test_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer.from_hf_folder(hf_folder(tmp_path, chat_template=named))
    assert tokenizer.has_chat_template and tokenizer.render_chat(MESSAGES) == "plain"
    assert ours(rag="only one").render_chat(MESSAGES) == "only one"
    with pytest.raises(PacelineError, match="no default chat template, only rag, tool_use"):
        ours(rag="one", tool_use="two").render_chat(MESSAGES)


def test_template_variables() -> None:
    tokenizer = ours(default="{{ eos_token }}{{ enable_thinking is defined and enable_thinking }}")
    assert tokenizer.render_chat(MESSAGES) == "</s>False"
    assert tokenizer.render_chat(MESSAGES, variables={"enable_thinking": True}) == "</s>True"


# --- folders that are not what they should be ---


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="no tokenizer files"):
        Tokenizer.from_hf_folder(tmp_path)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    path = hf_folder(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(PacelineError, match="the tokenizer cannot be loaded") as caught:
        Tokenizer.from_hf_folder(tmp_path)
    assert "\n" not in str(caught.value) and "fetch tokenizer.json" in caught.value.hint


# --- saving, decoding, cost ---


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    before = ours(default=TEMPLATES["with"], tool_use="déjà")
    before.save(tmp_path)
    after = Tokenizer.load(tmp_path)
    assert after.info == before.info
    assert after.token_strings() == before.token_strings()
    assert after.apply_chat_template(MESSAGES) == before.apply_chat_template(MESSAGES)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    inner = backend()
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    tokenizer = Tokenizer(inner, ours().info)
    assert 3 < len(tokenizer.encode(TEXT[0], add_special=False)) < 64


def test_decoding_is_of_the_whole() -> None:
    """Text of a prefix is a prefix of the text, but for a character that is not complete yet; no clean-up."""
    tokenizer = ours()
    text = "It 's déjà , don 't 😊 ."
    encoded = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(encoded) == text
    for end in range(len(encoded)):
        assert text.startswith(tokenizer.decode(encoded[:end]).rstrip("\ufffd"))
    choose = random.Random(0)
    for _ in range(200):
        random_ids = [choose.randrange(tokenizer.vocab_size) for _ in range(8)]
        expected = tokenizer.backend.decode(random_ids, skip_special_tokens=False)
        assert tokenizer.decode(random_ids, skip_special_tokens=False) == expected
    assert "</s>" not in tokenizer.decode([*encoded, tokenizer.eos_id or 0])
    assert tokenizer.decode([*encoded, tokenizer.eos_id or 0], skip_special_tokens=False).endswith("</s>")


def test_a_prepared_tokenizer_needs_no_transformers(tmp_path: Path) -> None:
    ours(default=TEMPLATES["with"]).save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from paceline.models.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(tmp_path)!r})).apply_chat_template([{{'role': 'user', 'content': 'x'}}]);"
        "print([name for name in ('transformers', 'torch', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
