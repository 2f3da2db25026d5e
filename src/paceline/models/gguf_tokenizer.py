"""The tokenizer that a GGUF file carries, built so that its ids equal the model's Hugging Face tokenizer's.

It holds a vocabulary and, in `tokenizer.ggml.pre`, the *name* of the rule that splits text before merging.
The same vocabulary under another rule gives other ids, so a name that is not in `PRE_TOKENIZERS` is refused.
Rules: llama.cpp `src/llama-vocab.cpp`; the patterns are those of the models' own tokenizer.json files, which
llama.cpp quotes beside its adaptations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.models.gguf import GgufFile
from paceline.models.gguf_metadata import Metadata
from paceline.models.tokenizer import Tokenizer, TokenizerInfo
from paceline.values import shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE vocabulary splits text."""

    splits: tuple[str, ...] = ()  # patterns, applied one after the other; each match stands alone
    individual_digits: bool = False
    gpt2_split: bool = False  # the pattern built into ByteLevel
    nfc: bool = False
    ignore_merges: bool = False  # a word that is itself a token is taken whole
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = PreTokenizer((_WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_WORDS + r"\p{N}" + _REST,), nfc=True)
_DIGITS_GPT2 = PreTokenizer(individual_digits=True, gpt2_split=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(gpt2_split=True),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), individual_digits=True),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}


def tokenizer_from_gguf(file: GgufFile, model_name: str | None = None) -> Tokenizer:
    """Tokenizer and chat templates of a GGUF file; refuses what it cannot reproduce exactly."""
    vocabulary = _Vocabulary(file)
    match vocabulary.model:
        case "gpt2":
            pre = _pre_tokenizer(vocabulary)
            backend, adds_bos = _byte_level(vocabulary, pre), pre.adds_bos
        case "llama":
            backend, adds_bos = _sentencepiece(vocabulary), True
        case other:
            raise PacelineError(
                f"{vocabulary.path}: tokenizer model {shown(other)} is not supported",
                hint="supported: gpt2 (byte-level BPE) and llama (SentencePiece)",
            )
    _add_whole_tokens(backend, vocabulary)
    return Tokenizer(backend, _info(vocabulary, adds_bos, model_name or file.parts[0].stem))


class _Vocabulary:
    """The `tokenizer.*` metadata, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.keys = Metadata(file.parts[0], file.metadata, "tokenizer.ggml.")
        self.path = self.keys.path
        self.model: str = self.keys.required("model", self.keys.text("model"))
        self.tokens: list[str] = self.keys.required("tokens", self.keys.texts("tokens"))
        self.types = self.keys.wholes("token_type") or [NORMAL] * len(self.tokens)
        if strange := set(self.types) - set(range(BYTE + 1)):
            raise PacelineError(f"{self.path}: token type {min(strange)} is not known")
        if len(self.types) != len(self.tokens):
            raise PacelineError(f"{self.path}: {len(self.tokens)} tokens, but {len(self.types)} token types")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise PacelineError(f"{self.path}: token {shown(twice)} is in the vocabulary twice")
        if self.model == "llama":
            self.tokens = [self._spelled(index) for index in range(len(self.tokens))]
            self.ids = {token: index for index, token in enumerate(self.tokens)}

    def token(self, key: str) -> str | None:
        index = self.token_id(key)
        return None if index is None else self.tokens[index]

    def token_id(self, key: str) -> int | None:
        index = self.keys.whole(f"{key}_token_id")
        if index is not None and not 0 <= index < len(self.tokens):
            raise PacelineError(f"{self.path}: {key}_token_id is {index}, the vocabulary has {len(self.tokens)} tokens")
        return index

    def _spelled(self, index: int) -> str:
        """The token as SentencePiece spells it: converters write runs of "▁" (Gemma's indents) as spaces."""
        token = self.tokens[index]
        marked = token.replace(" ", "▁")
        indent = self.types[index] == USER_DEFINED and not token.strip(" ") and marked not in self.ids
        return marked if indent else token


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.keys.text("pre")
    if name not in PRE_TOKENIZERS:
        said = "is missing" if name is None else f"is {shown(name)}, which is not known"
        raise PacelineError(
            f"{vocabulary.path}: tokenizer.ggml.pre {said}, and a guess might give wrong token ids",
            hint="convert the model again with a current llama.cpp, or use its safetensors; "
            f"known: {', '.join(PRE_TOKENIZERS)}",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Backend:
    pairs = []
    for merge in vocabulary.keys.required("merges", vocabulary.keys.texts("merges")):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    backend = _bpe(vocabulary, pairs, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    if pre.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_split))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    """SentencePiece's BPE (Llama 2, Mistral 7B, Gemma): "▁" for spaces, bytes for unknown characters."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if vocabulary.keys.get(key):
            raise PacelineError(f"{vocabulary.path}: 'tokenizer.ggml.{key}' is not supported")
    backend = _bpe(
        vocabulary,
        _merges_from_scores(vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    prefix_space = vocabulary.keys.flag("add_space_prefix") is not False
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix_space else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # tokenizers raises a bare Exception: a merge of tokens that do not exist
        raise PacelineError(f"{vocabulary.path}: the tokenizer's merges do not fit its vocabulary: {error}") from error


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges in the order SentencePiece applies them: every way to make a piece, best score first.

    Runs of "▁" come before all and grow from the left, which makes them the longest match that SentencePiece
    takes for user-defined pieces. Within a piece, pairs are ordered as by transformers' `generate_merges`.
    """
    tokens, ids, scores = vocabulary.tokens, vocabulary.ids, vocabulary.keys.reals("scores")
    if scores is None or len(scores) != len(tokens):
        count = "no" if scores is None else len(scores)
        raise PacelineError(f"{vocabulary.path}: {len(tokens)} tokens, but {count} scores")
    merges: list[tuple[str, str]] = []
    for token, kind in zip(tokens, vocabulary.types, strict=True):
        if kind == USER_DEFINED and not token.strip("▁"):
            merges += _splits(token, ids)
    merges.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    normal = [index for index, kind in enumerate(vocabulary.types) if kind == NORMAL]
    for index in sorted(normal, key=lambda index: -scores[index]):
        merges += _splits(tokens[index], ids)
    return merges


def _splits(token: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    return sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_whole_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Control and user-defined tokens are matched whole in the text; `decode` can omit the former."""
    special, plain = [], []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(text, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _info(vocabulary: _Vocabulary, adds_bos: bool, model_name: str) -> TokenizerInfo:
    named = {name: vocabulary.token(name) for name in ("bos", "eos", "unknown", "padding")}
    variables = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    bos, eos = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    if (said := vocabulary.keys.flag("add_bos_token")) is not None:
        adds_bos = said
    chat = replace(vocabulary.keys, prefix="tokenizer.")
    templates = {"default": chat.text("chat_template")}
    for name in chat.texts("chat_templates") or []:
        templates[name] = chat.text(f"chat_template.{name}")
    return TokenizerInfo(
        model_name=model_name,
        vocab_size=len(vocabulary.tokens),
        bos_id=bos,
        eos_id=eos,
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if vocabulary.keys.flag("add_eos_token") and eos is not None else (),
        chat_templates={name: text for name, text in templates.items() if text},
        special_tokens={variables[name]: token for name, token in named.items() if token is not None},
    )
