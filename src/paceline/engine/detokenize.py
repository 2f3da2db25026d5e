"""From token ids to text as they come: append-only, no character cut in two, no part of a stop string shown.

The deltas of a stream, joined, are what decoding all its ids at once gives, cut before the first stop string.
Three facts about decoders make that less than obvious:

* a token may hold part of a character: the text so far then ends in U+FFFD, which the next token may mend;
* a run of byte tokens (`<0xE2>`, of vocabularies with byte fallback) is read as a whole: one bad byte at its
  end spoils all of it, so nothing of the run is settled before a token follows that is no byte;
* the first token of a decode may lose its leading space, so tokens are decoded behind some of those before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# A decode looks at this many tokens before the new ones. Three would do: each has a byte at least, and what a
# cut does to a character ends within the next three bytes.
_CONTEXT = 4
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string ended the text."""

    stop: str
    num_tokens: int  # of the stream, up to and with the token that completed the match


class IncrementalDetokenizer:
    """The text of one stream of token ids.

    `push` the ids of each step, show what it returns, `flush` at the end. Of several stop strings the one
    that begins first in the text wins, whatever their order and wherever the steps are cut; once `match` is
    set, the text is final.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = _TextDecoder(tokenizer)
        self._stops = _StopStrings(stop)
        self._pieces: list[str] = []

    def fresh(self) -> "IncrementalDetokenizer":
        """Another one with the same stop strings, at the start of a stream."""
        return IncrementalDetokenizer(self._tokenizer, self._stop)

    @property
    def match(self) -> StopMatch | None:
        """The stop string that ended the text, if one did."""
        return self._stops.match

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._pieces)

    @property
    def num_settled(self) -> int:
        """How many tokens no stop string can take back any more, whatever follows."""
        return self._stops.num_settled

    def push(self, token_ids: Iterable[int]) -> str:
        """Append ids and return the text they settle; what follows a stop string is ignored."""
        delta = []
        for token_id in token_ids:
            if self.match is not None:
                break
            for text, num_tokens in self._decoder.push(token_id):
                delta.append(self._stops.push(text, num_tokens))
        return self._emit("".join(delta))

    def flush(self) -> str:
        """End the stream and return the text held back: the start of a stop string, half a character."""
        if self.match is not None:
            return ""
        delta = [self._stops.push(text, num_tokens) for text, num_tokens in self._decoder.flush()]
        return self._emit("".join(delta) + self._stops.flush())

    def _emit(self, delta: str) -> str:
        if delta:
            self._pieces.append(delta)
        return delta


class _TextDecoder:
    """Settled text, token by token, from decoding a sliding window: a constant cost per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = frozenset(tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._num_tokens = 0  # pushed so far
        self._window: list[int] = []  # the last visible tokens
        self._settled = 0  # characters of the window's text that were returned
        self._in_bytes = False  # the window ends with a byte token
        self._last_visible = 0  # number of the window's last token, from 1
        self._visible: dict[int, bool] = {}

    def push(self, token_id: int) -> Iterable[tuple[str, int]]:
        """The pieces of text that this token settles, each with the number of the token that ended it."""
        self._num_tokens += 1
        if not self._is_visible(token_id):
            return
        is_byte = token_id in self._byte_ids
        if self._in_bytes and not is_byte:
            yield self._settle(hold=False)  # the run has ended before this token
        self._window.append(token_id)
        self._last_visible = self._num_tokens
        self._in_bytes = is_byte
        if not is_byte:
            yield self._settle(hold=True)
            self._shorten()

    def flush(self) -> Iterable[tuple[str, int]]:
        yield self._settle(hold=False)

    def _settle(self, hold: bool) -> tuple[str, int]:
        text = self._tokenizer.decode(self._window)
        end = len(text) - (hold and text.endswith(_REPLACEMENT))
        piece = text[self._settled : end]
        self._settled = max(self._settled, end)
        return piece, self._last_visible

    def _shorten(self) -> None:
        if len(self._window) < _WINDOW:
            return
        self._window = self._window[-_CONTEXT:]
        text = self._tokenizer.decode(self._window)
        self._settled = len(text) - text.endswith(_REPLACEMENT)

    def _is_visible(self, token_id: int) -> bool:
        """Whether the token has text of its own; a skipped special token has none, and ends no run of bytes.

        Decoded twice in a row, since a lone space may be stripped as the first of a text.
        """
        visible = self._visible.get(token_id)
        if visible is None:
            visible = self._visible[token_id] = self._tokenizer.decode([token_id, token_id]) != ""
        return visible


class _StopStrings:
    """Passes text on, but for what may be the start of a stop string, until a stop string is complete."""

    def __init__(self, stop: Sequence[str]) -> None:
        for string in stop:
            if not string:
                raise PacelineError("a stop string is empty", hint="leave it out")
        self.match: StopMatch | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._num_tokens = 0  # the token that ended the last piece
        self._ends: list[tuple[int, int]] = []  # length of the held text after a token, number of that token

    def push(self, text: str, num_tokens: int) -> str:
        """Add a piece, ended by token `num_tokens`, and return the text that no stop string can take back."""
        if self.match is not None:
            return ""
        self._held += text
        self._num_tokens = num_tokens
        self._ends.append((len(self._held), num_tokens))
        found = self._first_match()
        begun = self._first_beginning(len(self._held) if found is None else found)
        # A match counts once none that begins before it is still open.
        if found is not None and begun == found:
            return self._finish(found)
        return self._release(begun)

    @property
    def num_settled(self) -> int:
        """A match ends at the first token with held text or later; without any, behind the last piece."""
        if self.match is not None:
            return self.match.num_tokens
        return self._ends[0][1] if self._ends else self._num_tokens

    def flush(self) -> str:
        """The text held back, cut at a match that only waited for another."""
        found = self._first_match()
        return self._release(len(self._held)) if found is None else self._finish(found)

    def _first_match(self) -> int | None:
        return min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=None)

    def _first_beginning(self, limit: int) -> int:
        """Where the first stop string begins that the end of the held text leaves open, or `limit`."""
        for at in range(max(0, len(self._held) - self._longest + 1), limit):
            if any(stop.startswith(self._held[at:]) for stop in self._stop):
                return at
        return limit

    def _finish(self, at: int) -> str:
        stop = min((stop for stop in self._stop if self._held.startswith(stop, at)), key=len)
        num_tokens = next(number for end, number in self._ends if end >= at + len(stop))
        self.match = StopMatch(stop, num_tokens)
        text, self._held = self._held[:at], ""
        return text

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._ends = [(end - length, number) for end, number in self._ends if end > length]
        return text
