"""Tokenizers from GGUF metadata: against transformers, sentencepiece, a published hash, splits by hand."""

import hashlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_samples import Sample
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.models.gguf import open_gguf
from paceline.models.gguf_tokenizer import tokenizer_from_gguf
from paceline.models.tokenizer import Tokenizer

PINNED = "I'm 12345 Café  déjà\n\n\tx 😊 don't"
TEXTS = [
    PINNED,
    "return  3",
    "def f(x):\n    return  x+10\n\n\n",
    "WE'LL DON'T we've",
    "e\u0301 é ﬁ ½ ² Ⅷ",
    "中文字 한국어 ひらがなカタカナ नमस्ते",
    "a\r\nb\r\n  c \u00a0 d \u3000e",
    "...!!! /* x */ <|im_end|><think>ok</think>",
    " leading and trailing  ",
    "HTTPServer camelCase ABCdef",
    "",
    "\x00\x7f",
]
CORPUS = [
    *TEXTS,
    "the quick brown fox jumps over the lazy dog " * 3,
    "I'm sure you don't say they'll 10 100 1000 ",
] * 4


def byte_level_sample(vocabulary: dict[str, int], merges: list[str], pre: str | None, **values: Any) -> Sample:
    """GGUF metadata of a byte-level BPE, with one control token, one user-defined, and one unused."""
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [1] * len(tokens)
    extra = {"<|im_end|>": 3, "<think>": 4, "[PAD]": 5}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *extra],
        "tokenizer.ggml.token_type": [*types, *extra.values()],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in values.items()}
    return Sample("llama", metadata)


def read(sample: Sample, folder: Path) -> Tokenizer:
    return tokenizer_from_gguf(open_gguf(sample.write(folder / "tok.gguf")))


def trained(pre_tokenizer: Any) -> Backend:
    """A small byte-level BPE whose merges were learned under `pre_tokenizer`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    return backend


def vocabulary_of(backend: Backend) -> tuple[dict[str, int], list[str]]:
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [" ".join(merge) for merge in model["merges"]]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


# --- byte-level BPE ---

_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# Pre-tokenizers as the models' own tokenizer.json files have them
REFERENCES = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([_DIGITS, _GPT2]),
    "deepseek-coder": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")]
        + [pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"), _DIGITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    ),
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_ids_are_those_of_the_tokenizer_that_was_trained(tmp_path: Path, pre: str) -> None:
    reference = trained(REFERENCES[pre])
    reference.add_special_tokens(["<|im_end|>"])
    vocabulary, merges = vocabulary_of(reference)
    ours = read(byte_level_sample(vocabulary, merges, pre), tmp_path)
    for text in TEXTS:
        text = text.replace("<think>", "")
        assert ids(ours, text) == reference.encode(text).ids, text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


def test_qwen2_ids_are_transformers(tmp_path: Path) -> None:
    """transformers' class brings its own pattern and the NFC normaliser, which llama.cpp leaves out."""
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    reference = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=pairs, eos_token="<|im_end|>")
    ours = read(byte_level_sample(vocabulary, merges, "qwen2"), tmp_path)
    texts = [text.replace("<|im_end|>", "").replace("<think>", "") for text in TEXTS]
    for text in texts:
        assert ids(ours, text) == reference(text)["input_ids"], text
    assert ids(ours, "e\u0301") == ids(ours, "é")


WORDS = {  # PINNED and "WE'LL a\r\n/ 1234", split by hand from the published patterns; ␣ stands for a space
    "gpt-2": "I 'm ␣12345 ␣Café ␣ ␣déjà \n\n \t x ␣😊 ␣don 't | WE ' LL ␣a \r \n / ␣1234",
    "smollm": "I 'm ␣ 1 2 3 4 5 ␣Café ␣ ␣déjà \n\n \t x ␣😊 ␣don 't | WE ' LL ␣a \r \n / ␣ 1 2 3 4",
    "llama-bpe": "I 'm ␣ 123 45 ␣Café ␣ ␣déjà \n\n \tx ␣😊 ␣don 't | WE 'LL ␣a \r\n / ␣ 123 4",
    "qwen2": "I 'm ␣ 1 2 3 4 5 ␣Café ␣ ␣déjà \n\n \tx ␣😊 ␣don 't | WE 'LL ␣a \r\n / ␣ 1 2 3 4",
    "tekken": "I 'm ␣ 1 2 3 4 5 ␣Café ␣ ␣déjà \n\n \tx ␣😊 ␣don 't | WE 'LL ␣a \r\n / ␣ 1 2 3 4",
    "deepseek-coder": "I ' m ␣ 1 2 3 4 5 ␣Café ␣ ␣déjà \n \n \tx ␣😊 ␣don ' t | WE ' LL ␣a \r \n / ␣ 1 2 3 4",
    "deepseek-v3": "I 'm ␣ 123 45 ␣Café ␣ ␣déjà \n\n \tx ␣😊 ␣don 't | WE 'LL ␣a \r\n / ␣ 123 4",
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_split_by_hand(tmp_path: Path, pre: str) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    ours = read(byte_level_sample(vocabulary, merges, pre), tmp_path)
    first, second = ([w.replace("␣", " ") for w in side.split(" ")] for side in WORDS[pre].split(" | "))
    for text, expected in ((PINNED, first), ("WE'LL a\r\n/ 1234", second)):
        assert "".join(expected) == text
        pieces = ours.backend.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in pieces] == expected


def test_tekken_splits_camel_case_and_llama_does_not(tmp_path: Path) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    for pre, expected in (("tekken", 3), ("llama-bpe", 1)):
        ours = read(byte_level_sample(vocabulary, merges, pre), tmp_path)
        assert len(ours.backend.pre_tokenizer.pre_tokenize_str("myCamelCase")) == expected


def test_a_whole_word_needs_no_merges(tmp_path: Path) -> None:
    """Llama 3 and Tekken take a word that is a token although no merge makes it; Qwen does not."""
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    vocabulary["qzqz"] = len(vocabulary)
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        ours = read(byte_level_sample(vocabulary, merges, pre), tmp_path)
        assert (ids(ours, "qzqz") == [vocabulary["qzqz"]]) is whole


@pytest.mark.parametrize("pre", [None, "default", "falcon", "brand-new"])
def test_unknown_pre_tokenizers_are_refused(tmp_path: Path, pre: str | None) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    with pytest.raises(PacelineError) as caught:
        read(byte_level_sample(vocabulary, merges, pre), tmp_path)
    assert "tokenizer.ggml.pre" in str(caught.value) and (pre is None or repr(pre) in str(caught.value))
    assert "smollm" in str(caught.value.hint)


def test_whole_tokens(tmp_path: Path) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    ours = read(byte_level_sample(vocabulary, merges, "gpt-2"), tmp_path)
    control, user, unused = (len(vocabulary) + i for i in range(3))
    encoded = ids(ours, "a<|im_end|><think>b[PAD]")
    assert encoded[1:3] == [control, user] and unused not in encoded
    assert ours.decode(encoded) == "a<think>b[PAD]"
    assert ours.decode(encoded, skip_special_tokens=False) == "a<|im_end|><think>b[PAD]"
    strings = ours.token_strings()
    assert len(strings) == ours.vocab_size == len(vocabulary) + 3
    assert strings[control:] == ["<|im_end|>", "<think>", "[PAD]"]
    assert all(strings[index] == token for token, index in vocabulary.items())


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, 0),
        ("gpt-2", True, 1),
        ("llama-bpe", None, 1),
        ("llama-bpe", False, 0),
        ("qwen2", None, 0),
    ],
)
def test_bos_as_the_file_says(tmp_path: Path, pre: str, flag: bool | None, expected: int) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    ours = read(byte_level_sample(vocabulary, merges, pre, ggml__add_bos_token=flag), tmp_path)
    assert ours.bos_id == len(vocabulary)
    assert ours.encode("hi", add_special=True) == [ours.bos_id] * expected + ids(ours, "hi")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ggml__merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"ggml__tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"ggml__model": "bert"}, "'bert'"),
        ({"ggml__merges": ["qq zz"]}, "merges do not fit"),
        ({"ggml__token_type": [1, 1]}, "2 token types"),
        ({"ggml__eos_token_id": 99999}, "eos_token_id is 99999"),
    ],
)
def test_broken_vocabularies(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    with pytest.raises(PacelineError) as caught:
        read(byte_level_sample(vocabulary, merges, "gpt-2", **changes), tmp_path)
    assert says in str(caught.value) and "tok.gguf" in str(caught.value)


def test_a_token_twice(tmp_path: Path) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    sample = byte_level_sample(vocabulary, merges, "gpt-2")
    sample.values["tokenizer.ggml.tokens"][300] = "a"
    with pytest.raises(PacelineError, match="token 'a' is in the vocabulary twice"):
        read(sample, tmp_path)


def test_named_chat_templates(tmp_path: Path) -> None:
    vocabulary, merges = vocabulary_of(trained(_GPT2))
    sample = byte_level_sample(vocabulary, merges, "gpt-2", chat_template="plain")
    sample.values["tokenizer.chat_templates"] = ["tool_use"]
    sample.values["tokenizer.chat_template.tool_use"] = "tools"
    ours = read(sample, tmp_path)
    assert ours.info.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert ours.info.special_tokens == {"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"}


# --- SentencePiece ---


def sentencepiece_model(**options: Any) -> Any:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in CORPUS if "\x00" not in text and text]),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_sample(processor: Any, prefix_space: bool | None) -> Sample:
    """Metadata as llama.cpp's converter writes it: types as in SentencePiece, indents as spaces."""
    tokens, types = [], []
    for index in range(processor.get_piece_size()):
        piece, kind = processor.id_to_piece(index), 1
        if processor.is_unknown(index):
            kind = 2
        elif processor.is_control(index):
            kind = 3
        elif processor.is_byte(index):
            kind = 6
        elif piece in ("▁▁", "▁▁▁", "▁▁▁▁", "<tag>"):
            kind, piece = 4, piece.replace("▁", " ")
        tokens.append(piece)
        types.append(kind)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(processor.get_score(index)) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix_space,
    }
    return Sample("llama", metadata)


def variations() -> list[str]:
    """TEXTS and 300 random mixtures of their pieces, spaces and rare characters."""
    choose = random.Random(0)
    parts = [word for text in TEXTS for word in text.split()] + [
        "  ",
        "   ",
        "     ",
        "\n",
        "\n\n",
        "ü",
        "€",
        "<tag>",
    ]
    mixed = ["".join(choose.choice([*parts, " "]) for _ in range(choose.randint(1, 12))) for _ in range(300)]
    return [text for text in [*TEXTS, *mixed] if "\x00" not in text]


@pytest.mark.parametrize("prefix_space", [None, False])
def test_ids_are_sentencepieces(tmp_path: Path, prefix_space: bool | None) -> None:
    """Llama's way (a space before the text) and Gemma's (none, indents as user-defined pieces)."""
    gemma = prefix_space is False
    pieces = ["▁▁", "▁▁▁", "▁▁▁▁", "<tag>"] if gemma else []
    processor = sentencepiece_model(add_dummy_prefix=not gemma, user_defined_symbols=pieces)
    ours = read(sentencepiece_sample(processor, prefix_space), tmp_path)
    different = [text for text in variations() if ids(ours, text) != processor.encode(text)]
    assert not different
    assert all(ours.decode(ids(ours, text)) == text for text in variations())
    assert ours.encode("hi", add_special=True)[0] == processor.bos_id()


def test_scores_are_needed(tmp_path: Path) -> None:
    sample = sentencepiece_sample(sentencepiece_model(), None)
    sample.values["tokenizer.ggml.scores"] = None
    with pytest.raises(PacelineError, match="no scores"):
        read(sample, tmp_path)


# --- a published model ---

# llama.cpp tells pre-tokenizers apart by the SHA-256 of the ids that the model's Hugging Face tokenizer gives
# for this text (convert_hf_to_gguf_update.py); the hash below is the one it publishes for SmolLM.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 "
    "?我想在apple工作1314151天～ ------======= нещо на Български "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
PINNED_IDS = [57, 5248, 216, 33, 34, 35, 36, 37, 48031, 2756, 216]  # I 'm ␣ 1 2 3 4 5 ␣Caf é ␣
PINNED_IDS += [32564, 90, 16739, 1116, 197, 104, 40303, 228, 1326, 982]  # ␣dé j à \n\n \t x ␣😊 (two) ␣don 't
SMOLLM_HASH = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"


@pytest.mark.model
def test_smollm2_ids_have_the_published_hash(smollm2_gguf: Path) -> None:
    encoded = tokenizer_from_gguf(open_gguf(smollm2_gguf)).encode(CHECK_TEXT, add_special=True)
    assert hashlib.sha256(str(encoded).encode()).hexdigest() == SMOLLM_HASH


@pytest.mark.model
def test_smollm2_pinned_ids(smollm2_gguf: Path) -> None:
    """Digits stand alone: the space before "3" is one token of two, not part of " 3"."""
    ours = tokenizer_from_gguf(open_gguf(smollm2_gguf))
    strings = ours.token_strings()
    assert ids(ours, "return  3") == [5406, 256, 35]
    assert [strings[i] for i in (5406, 256, 35)] == ["return", "ĠĠ", "3"]
    assert ids(ours, PINNED) == PINNED_IDS
    assert ours.decode(PINNED_IDS) == PINNED


# --- wrongly typed keys ---

SCALARS: list[Any] = [0, 1.5, "x", True]
LISTS: list[Any] = [[1], ["a"], [0.5], [True]]
FITTING = {
    "model": [], "pre": [], "tokens": [], "merges": [], "token_type": [], "scores": [],
    "bos_token_id": [0], "eos_token_id": [0], "unknown_token_id": [0], "padding_token_id": [0],
    "add_bos_token": [True], "add_eos_token": [True], "add_space_prefix": [True],
}  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("key", FITTING)
def test_a_value_of_the_wrong_type_is_refused_in_one_line(tmp_path: Path, model: str, key: str) -> None:
    """tokenizers is written in Rust, and panics (a BaseException) at some of them."""
    vocabulary, merges = {"a": 0, "b": 1, "ab": 2}, ["a b"]
    sample = byte_level_sample(vocabulary, merges, "qwen2", ggml__scores=[0.5] * 6)
    sample.values["tokenizer.ggml.model"] = model
    unread = {"gpt2": {"scores", "add_space_prefix"}, "llama": {"merges", "pre"}}[model]
    file = open_gguf(sample.write(tmp_path / "tok.gguf"))
    for value in [*SCALARS, *LISTS]:
        if any(value is fit for fit in FITTING[key]) or (type(value) is int and value in FITTING[key]) or key in unread:
            continue
        changed = replace(file, metadata={**file.metadata, f"tokenizer.ggml.{key}": value})
        with pytest.raises(PacelineError) as caught:
            tokenizer_from_gguf(changed)
        assert "\n" not in str(caught.value) and "tok.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("chat_template", 3), ("chat_templates", "x"), ("chat_templates", [1]), ("ggml.token_type", [9] * 6)],
)
def test_chat_templates_and_token_types(tmp_path: Path, key: str, value: Any) -> None:
    file = open_gguf(byte_level_sample({"a": 0, "b": 1, "ab": 2}, ["a b"], "qwen2").write(tmp_path / "tok.gguf"))
    with pytest.raises(PacelineError, match=r"tok\.gguf"):
        tokenizer_from_gguf(replace(file, metadata={**file.metadata, f"tokenizer.{key}": value}))
