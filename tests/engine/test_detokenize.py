"""The text of a stream, against decoding all its ids at once with the `tokenizers` library."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from paceline.engine.detokenize import IncrementalDetokenizer, StopMatch
from paceline.errors import PacelineError
from paceline.models.tokenizer import Tokenizer, TokenizerInfo


class Vocabulary(Tokenizer):
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, TokenizerInfo("test", backend.get_vocab_size()))
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def ids(self, *tokens: str) -> list[int]:
        return [{v: k for k, v in enumerate(self.token_strings())}[token] for token in tokens]


def byte_level() -> Vocabulary:
    """The decoder of GPT-2, Llama 3 and Qwen: byte b is token b; words, and pieces of characters, follow."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def spell(data: bytes) -> str:
        return "".join(alphabet[byte] for byte in data)

    words = ["hello", " world", " the", "é", "😀", "日本", "\ufffd", "\n\n", "  ", ".", " ."]
    face = "😀".encode()
    pieces = [face[:2], face[2:], face[:3], b"\xa9 a", b"x\xe2\x82", b"\xac\xf0"]
    texts = [*(bytes([byte]) for byte in range(256)), *map(str.encode, words), *pieces]
    strings = map(spell, texts)
    vocab = {string: i for i, string in enumerate(dict.fromkeys(strings))}
    tokenizer = Backend(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool é>")])
    return Vocabulary(tokenizer)


WORDS = [
    "▁",
    "▁▁",
    "▁▁▁▁",
    "▁the",
    "▁x",
    "hello",
    "▁leading",
    "é",
    "日",
    ".",
    "a",
    "TRE",
    "\n",
    "\ufffd",
    "▁.",
]


def byte_fallback() -> Vocabulary:
    """The decoder of Llama 2, Mistral and Gemma: bytes in runs, and the first space stripped."""
    vocab = {string: i for i, string in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS])}
    tokenizer = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Vocabulary(tokenizer)


def metaspace() -> Vocabulary:
    """The decoder of T5-like vocabularies: every space of the first token is dropped."""
    vocab = {string: i for i, string in enumerate(["<unk>", *WORDS])}
    tokenizer = Backend(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Vocabulary(tokenizer)


VOCABULARIES = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "metaspace": metaspace()}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]


def run(detokenizer: IncrementalDetokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """The deltas of `ids` pushed in blocks of these sizes, in turn."""
    deltas = []
    start = turn = 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.flush()]


def expected(vocabulary: Vocabulary, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The definition: decode everything, cut before the stop string that begins first."""
    text = vocabulary.decode(ids)
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def streams(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Any ids, some beyond the vocabulary, and runs of one id."""
    token = st.integers(0, vocabulary.vocab_size + 2)
    runs = st.lists(st.tuples(token, st.one_of(st.just(1), st.integers(1, 30))), max_size=40)
    return runs.map(lambda pairs: [token_id for token_id, count in pairs for _ in range(count)])


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_deltas_joined_are_the_decoded_ids(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    ids = data.draw(streams(vocabulary))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    assert "".join(run(IncrementalDetokenizer(vocabulary), ids, sizes)) == vocabulary.decode(ids)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_cut_the_text_and_not_the_steps(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    ids = data.draw(streams(vocabulary))
    text = vocabulary.decode(ids)
    # Pieces of the text itself, so that most of them match, and overlap.
    start, length = st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)
    window = st.tuples(start, length).map(lambda w: text[w[0] : w[0] + w[1]])
    stop = [s for s in data.draw(st.lists(window, max_size=3)) if s]
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    detokenizer = IncrementalDetokenizer(vocabulary, stop)
    assert "".join(run(detokenizer, ids, sizes)) == expected(vocabulary, ids, stop) == detokenizer.text
    assert (detokenizer.match is not None) == any(s in text for s in stop)
    single = IncrementalDetokenizer(vocabulary, stop)
    run(single, ids)
    assert detokenizer.match == single.match


def test_long_random_streams(vocabulary: Vocabulary) -> None:
    source = random.Random(5)
    for _ in range(60):
        ids = [source.randrange(vocabulary.vocab_size) for _ in range(200)]
        assert "".join(run(IncrementalDetokenizer(vocabulary), ids)) == vocabulary.decode(ids)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
def test_a_character_in_several_tokens_is_shown_whole(blocks: int) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    # 😀 as four tokens of a byte, as 2 + 2, as four again: pushed so that every edge between steps is tried.
    by_bytes = list("😀".encode())
    halves = [i for i in range(256, vocabulary.vocab_size) if "\ufffd" in vocabulary.decode([i])]
    pair = next([a, b] for a in halves for b in halves if vocabulary.decode([a, b]) == "😀")
    deltas = run(IncrementalDetokenizer(vocabulary), by_bytes + pair + by_bytes, [blocks])
    assert "".join(deltas) == "😀😀😀"
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_cut_by_the_end_is_what_decoding_says() -> None:
    vocabulary = VOCABULARIES["byte_fallback"]
    ids = vocabulary.ids("hello", "<0xF0>", "<0x9F>")
    detokenizer = IncrementalDetokenizer(vocabulary)
    assert detokenizer.push(ids) == "hello"
    assert detokenizer.flush() == vocabulary.decode(ids)[5:] == "\ufffd\ufffd"


def test_a_bad_byte_takes_back_no_character() -> None:
    """In one run of byte tokens a bad byte spoils the good ones before it: they may not have been shown."""
    vocabulary = VOCABULARIES["byte_fallback"]
    ids = vocabulary.ids("a", "<0xC3>", "<0xA9>", "<s>", "<0x80>", "a")
    assert vocabulary.decode(ids) == "a\ufffd\ufffd\ufffda"
    detokenizer = IncrementalDetokenizer(vocabulary)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "", "\ufffd\ufffd\ufffda"]


def test_spaces_are_neither_lost_nor_doubled() -> None:
    for name in ("byte_fallback", "metaspace"):
        vocabulary = VOCABULARIES[name]
        for tokens, text in [
            (["▁", "▁leading", "▁x"], None),
            (["▁▁▁▁", "."], None),
            (["<s>", "▁the", "▁", "▁", "▁x"], "the   x"),
        ]:
            ids = vocabulary.ids(*tokens)
            assert text is None or vocabulary.decode(ids) == text
            assert "".join(run(IncrementalDetokenizer(vocabulary), ids)) == vocabulary.decode(ids)


def test_text_is_shown_as_soon_as_it_is_settled() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.ids("hello", "Ġworld", "Ġthe")
    detokenizer = IncrementalDetokenizer(vocabulary)
    assert [detokenizer.push([i]) for i in ids] == ["hello", " world", " the"]


def letters(text: str) -> list[int]:
    """One token a character, in the byte-level vocabulary."""
    return list(text.encode())


@pytest.mark.parametrize("size", range(1, 12))
def test_no_part_of_a_stop_string_leaks(size: int) -> None:
    detokenizer = IncrementalDetokenizer(VOCABULARIES["byte_level"], ["STOP here"])
    deltas = run(detokenizer, letters("go on STOP here and more"), [size])
    assert "".join(deltas) == "go on "
    assert detokenizer.match == StopMatch("STOP here", len("go on STOP here"))


@pytest.mark.parametrize("tail", ["", "x"])
def test_the_held_start_of_a_stop_string_is_not_lost(tail: str) -> None:
    """`TRE\\nAAAA` never completes: its start comes out when something else follows, and at the end."""
    text = "a TRE\nAA" + tail
    detokenizer = IncrementalDetokenizer(VOCABULARIES["byte_level"], ["TRE\nAAAA"])
    assert detokenizer.push(letters("a TRE\nAA")) == "a "
    assert detokenizer.push(letters(tail)) + detokenizer.flush() == text[2:]
    assert detokenizer.match is None


@pytest.mark.parametrize(
    ("text", "stops", "kept", "stop", "num_tokens"),
    [
        ("hello world", ["world", "hello"], "", "hello", 5),  # not the first listed
        ("xab", ["b", "ab"], "x", "ab", 3),
        ("xabcd!", ["c", "abcd"], "x", "abcd", 5),  # begins first though it ends later
        ("xabce!", ["c", "abcd"], "xab", "c", 4),  # … and never ends
        ("xabc", ["c", "abcd"], "xab", "c", 4),  # … since the stream ends
        ("aab", ["ab"], "a", "ab", 3),  # a beginning inside a beginning
        ("abab", ["abc", "bab"], "a", "bab", 4),
        ("ab", ["abc", "ab"], "", "ab", 2),  # the shorter of two that begin together
        ("zabc!", ["zabq", "abc", "ab"], "z", "ab", 3),  # … both known only once the z is out
        ("a. b", ["."], "a", ".", 2),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 20])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_match_that_begins_first_wins(
    text: str, stops: list[str], kept: str, stop: str, num_tokens: int, size: int, reverse: bool
) -> None:
    detokenizer = IncrementalDetokenizer(VOCABULARIES["byte_level"], stops[::-1] if reverse else stops)
    assert "".join(run(detokenizer, letters(text), [size])) == kept
    assert detokenizer.match == StopMatch(stop, num_tokens)


def test_what_follows_a_match_is_ignored() -> None:
    detokenizer = IncrementalDetokenizer(VOCABULARIES["byte_level"], ["!"])
    assert detokenizer.push(letters("a!b")) == "a"
    assert detokenizer.push(letters("c!")) == "" == detokenizer.flush()
    assert detokenizer.match == StopMatch("!", 2)


def test_a_stop_string_of_bytes_ends_at_its_last_byte() -> None:
    """The token after the run only shows that it has ended: it is no part of the match."""
    vocabulary = VOCABULARIES["byte_fallback"]
    detokenizer = IncrementalDetokenizer(vocabulary, ["é"])
    assert "".join(run(detokenizer, vocabulary.ids("a", "<0xC3>", "<0xA9>", "▁x"))) == "a"
    assert detokenizer.match == StopMatch("é", 3)


@pytest.mark.parametrize("stop", [(), []])
def test_no_stop_strings(stop: Sequence[str]) -> None:
    assert "".join(run(IncrementalDetokenizer(VOCABULARIES["byte_level"], stop), letters("a b"))) == "a b"


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(PacelineError, match="stop string is empty"):
        IncrementalDetokenizer(VOCABULARIES["byte_level"], stop)


@pytest.mark.parametrize("token", ["hello", "▁", "<0x80>", "<0x41>", "<s>"])
def test_the_cost_of_a_token_is_constant(token: str) -> None:
    """Ids decoded per token pushed, in the worst streams: half characters, bytes, nothing visible."""
    vocabulary = byte_fallback()
    run(IncrementalDetokenizer(vocabulary), vocabulary.ids(token) * 3000)
    assert vocabulary.num_decoded <= 20 * 3000


def test_the_cost_of_garbage_bytes_is_constant() -> None:
    vocabulary = byte_level()
    assert "".join(run(IncrementalDetokenizer(vocabulary), [0x80] * 3000)) == "\ufffd" * 3000
    assert vocabulary.num_decoded <= 20 * 3000
