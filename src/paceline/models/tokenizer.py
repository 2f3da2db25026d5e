"""Text to token ids and back: one class over a `tokenizers.Tokenizer`, wherever that came from.

`tokenizers` alone is imported here; transformers only to read a Hugging Face folder for the first time, since
importing it takes longer than loading a prepared tokenizer.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.models.chat_template import WITHOUT_TEMPLATE, render_chat_template

BACKEND_FILE = "tokenizer.json"
INFO_FILE = "paceline_tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What `tokenizer.json` does not say, or says in too many ways."""

    model_name: str  # for messages
    vocab_size: int  # highest id + 1
    bos_id: int | None = None
    eos_id: int | None = None
    prefix_ids: tuple[int, ...] = ()  # put before a prompt: BOS, where the model wants one
    suffix_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; "default" is used
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # template variables: bos_token …


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, backend: Backend, info: TokenizerInfo) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.info = backend, info

    @property
    def vocab_size(self) -> int:
        """Highest token id + 1. A model's own vocabulary may be padded beyond it."""
        return self.info.vocab_size

    @property
    def bos_id(self) -> int | None:
        return self.info.bos_id

    @property
    def eos_id(self) -> int | None:
        return self.info.eos_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self.info.chat_templates)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of `text`, in which special tokens are recognised by their text.

        `add_special` puts the model's prefix (BOS) before them unless `text` already begins with it, so that
        there is never a second one. Raises PacelineError for text that holds half a surrogate pair.
        """
        _check_text(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return self._with_prefix(ids) + list(self.info.suffix_ids) if add_special else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Spaces are never "cleaned up": the text of more ids only ever adds to it."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_strings(self) -> list[str]:
        """Tokens in id order, as the model spells them ("Ġthe", "▁the"); "" where an id has no token."""
        strings = [""] * self.vocab_size
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            strings[token_id] = token
        return strings

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation in the model's chat format; the template sees `variables` too."""
        given = {**self.info.special_tokens, **(variables or {})}
        return render_chat_template(self._chat_template(), messages, add_generation_prompt, given)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, with exactly one BOS where the model wants it, whoever writes it."""
        text = self.render_chat(messages, add_generation_prompt, variables)
        return self._with_prefix(self.encode(text, add_special=False))

    def save(self, folder: Path) -> None:
        """Write the two files that `load` reads back; an existing folder is needed."""
        self.backend.save(str(folder / BACKEND_FILE), pretty=False)
        text = json.dumps(dataclasses.asdict(self.info), ensure_ascii=False, indent=1)
        (folder / INFO_FILE).write_text(text, encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Read what `save` wrote."""
        fields = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
        for name in ("prefix_ids", "suffix_ids"):
            fields[name] = tuple(fields[name])
        return Tokenizer(Backend.from_file(str(folder / BACKEND_FILE)), TokenizerInfo(**fields))

    @staticmethod
    def from_hf_folder(folder: str | Path, model_name: str | None = None) -> "Tokenizer":
        """Tokenizer of a Hugging Face folder, through transformers; fetches nothing, runs no code of it."""
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _HF_FILES):
            raise PacelineError(f"{folder}: no tokenizer files", hint=f"the folder needs one of {', '.join(_HF_FILES)}")
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever the file at fault provoked
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PacelineError(
                f"{folder}: the tokenizer cannot be loaded: {reason}",
                hint="fetch tokenizer.json and tokenizer_config.json again",
            ) from error
        return Tokenizer.from_transformers(hf, model_name or folder.name, str(folder))

    @staticmethod
    def of_hf_folder(folder: Path) -> "Tokenizer | None":
        """As `from_hf_folder`; None for a folder without tokenizer files."""
        return Tokenizer.from_hf_folder(folder) if any((folder / name).exists() for name in _HF_FILES) else None

    @staticmethod
    def from_transformers(hf: Any, model_name: str, where: str | None = None) -> "Tokenizer":
        """From transformers' own (fast) tokenizer; the two share nothing that changes."""
        where = where or model_name
        if not isinstance(backend := getattr(hf, "backend_tokenizer", None), Backend):
            raise PacelineError(
                f"{where}: {type(hf).__name__} has no fast tokenizer", hint="save it with a tokenizer.json"
            )
        backend = Backend.from_str(backend.to_str())
        around = _template_ids(backend, where)
        templates = hf.chat_template or {}
        info = TokenizerInfo(
            model_name=model_name,
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
            bos_id=hf.bos_token_id,
            eos_id=hf.eos_token_id,
            prefix_ids=around.prefix,
            suffix_ids=around.suffix,
            chat_templates=templates if isinstance(templates, dict) else {"default": templates},
            special_tokens={k: str(v) for k, v in hf.special_tokens_map.items() if isinstance(v, str)},
        )
        return Tokenizer(backend, info)

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self.info.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _chat_template(self) -> str:
        templates, name = self.info.chat_templates, self.info.model_name
        if not templates:
            raise PacelineError(f"model {name} has no chat template", hint=WITHOUT_TEMPLATE)
        if "default" in templates:
            return templates["default"]
        if len(templates) == 1:
            return next(iter(templates.values()))
        raise PacelineError(
            f"model {name} has no default chat template, only {', '.join(sorted(templates))}",
            hint=WITHOUT_TEMPLATE,
        )


_HF_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class _TemplateIds:
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def _template_ids(backend: Backend, where: str) -> _TemplateIds:
    """What the tokenizer's post-processor puts around a text, found by encoding one."""
    inner = backend.encode("a", add_special_tokens=False).ids
    outer = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(outer) - len(inner) + 1):
        end = start + len(inner)
        if outer[start:end] == inner:
            return _TemplateIds(tuple(outer[:start]), tuple(outer[end:]))
    raise PacelineError(f"{where}: the tokenizer changes a text when it adds special tokens")


def _check_text(text: str) -> None:
    """Half of a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PacelineError(
            f"the text holds half a character, {text[error.start]!r}, at position {error.start}",
            hint='decode the text with errors="replace"',
        ) from None
