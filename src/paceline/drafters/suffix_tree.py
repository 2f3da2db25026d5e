"""How often each token followed each context: the counts that suffix decoding drafts from.

A suffix tree of the text read backwards, cut at a depth: its strings are, for every position, the tokens before that
position, nearest first, and each node counts what came next. Contexts that always occur together share a node (edges
are compressed), so there are fewer than two nodes a token however much the text repeats itself. A token is one string,
whole at once: adding and removing it are one walk of at most `depth` nodes each, and a removal leaves no trace.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Text: TypeAlias = "array[int]"

ROUNDING = 1e-9  # scores that differ by less are equal: their sums of fractions round differently


def as_text(tokens: Sequence[int] = ()) -> Text:
    """Token ids in four bytes each."""
    return array("i", tokens)


@dataclass(frozen=True, slots=True)
class DraftLength:
    """How far to trust a match: at most factor·length + offset tokens, none less likely than `min_token_prob`."""

    factor: float = 1.0
    offset: float = 0.0
    min_token_prob: float = 0.1

    def limit(self, match_length: int, budget: int) -> int:
        return min(budget, int(self.factor * match_length + self.offset + ROUNDING))


@dataclass(frozen=True, slots=True)
class Continuation:
    """A likely continuation; `score` is the number of its tokens expected to be right, going by frequency."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(slots=True, eq=False)
class _Node:
    """Contexts that occur together. The edge to it reads `text[end - length : end]`, last token first."""

    text: Text
    end: int
    length: int
    above: int  # tokens between the edge and what follows the context
    total: int = 0  # times that such a context was followed by anything
    best: int = -1  # the most frequent follower, the latest of equals
    counts: dict[int, int] | None = None  # by follower, latest last; None while `best` is the only one
    children: "dict[int, _Node] | None" = None  # by the next token further back

    @property
    def share_of_best(self) -> float:
        return 1.0 if self.counts is None else self.counts[self.best] / self.total

    def count(self, token: int) -> None:
        self.total += 1
        if self.counts is None:
            if self.total == 1:
                self.best = token
            elif token != self.best:
                self.counts = {self.best: self.total - 1, token: 1}
                self.best = token if self.total == 2 else self.best
            return
        self.counts[token] = self.counts.pop(token, 0) + 1
        if self.counts[token] >= self.counts[self.best]:
            self.best = token

    def discount(self, token: int) -> None:
        """Undo the oldest `count(token)`: the order by latest occurrence stays as it is."""
        self.total -= 1
        if self.counts is None:
            return
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if len(self.counts) == 1:
            (self.best,) = self.counts
            self.counts = None
        elif token == self.best:
            most = max(self.counts.values())
            self.best = next(other for other in reversed(self.counts) if self.counts[other] == most)

    def upper_part(self, length: int) -> "_Node":
        """A new node `length` tokens below the parent, with this one hung under it."""
        counts = None if self.counts is None else dict(self.counts)
        upper = _Node(self.text, self.end, length, self.above, self.total, self.best, counts)
        self.end -= length
        self.length -= length
        self.above += length
        upper.children = {self.text[self.end - 1]: self}
        return upper


@dataclass(slots=True)
class SuffixTree:
    """Followers of all contexts of up to `depth` tokens. Texts must leave in the order in which they came."""

    depth: int
    _root: _Node = field(default_factory=lambda: _Node(as_text(), 0, 0, 0, children={}))

    def add(self, text: Text, position: int) -> None:
        """Count `text[position]` as the follower of what stands before it. `text` is kept, and must only grow."""
        token, node, end = text[position], self._root, position
        stop = max(0, position - self.depth)
        while end > stop:
            if node.children is None:
                node.children = {}
            child = node.children.get(text[end - 1])
            if child is None:
                child = _Node(text, end, end - stop, position - end)
                node.children[text[end - 1]] = child
            else:
                shared = _shared(child, text, end, end - stop)
                if shared < child.length:
                    child = node.children[text[end - 1]] = child.upper_part(shared)
                # The edge is read from its latest occurrence: the last that will be removed.
                child.text, child.end = text, end
            child.count(token)
            node = child
            end -= child.length

    def remove(self, text: Text, position: int) -> None:
        """Undo `add(text, position)`, the oldest that is left."""
        token, node, end = text[position], self._root, position
        stop = max(0, position - self.depth)
        above = node
        while end > stop:
            children = _children(node)
            child = children[text[end - 1]]
            child.discount(token)
            if not child.total:  # nor is there anything below it
                del children[text[end - 1]]
                break
            above, node = node, child
            end -= child.length
        if node is not self._root:
            _join(above, node)

    def continuation(self, context: Text, budget: int, draft_length: DraftLength) -> Continuation:
        """The best-scored draft of at most `budget` tokens after `context`; of equals that of the longest match."""
        best = Continuation()
        for length, node in reversed(self._matches(context)):
            limit = draft_length.limit(length, budget)
            if limit * node.share_of_best > best.score + ROUNDING:  # else it cannot win
                draft = self._follow(context[len(context) - length :], node, limit, draft_length.min_token_prob)
                best = draft if draft.score > best.score + ROUNDING else best
        return best

    def count(self, context: Sequence[int], follower: int | None = None) -> int:
        """How often `context` (1 to `depth` tokens) was followed by `follower`, or by anything."""
        node = self._find(as_text(context), len(context))
        if node is None or follower is None:
            return 0 if node is None else node.total
        return (node.counts or {node.best: node.total}).get(follower, 0)

    def num_nodes(self) -> int:
        """Nodes in memory, the root not counted."""
        open_nodes, found = [self._root], -1
        while open_nodes:
            found += 1
            open_nodes.extend((open_nodes.pop().children or {}).values())
        return found

    def _matches(self, context: Text) -> list[tuple[int, _Node]]:
        """Suffixes of `context` that were followed before; of those that always occurred together the longest."""
        node, end, found = self._root, len(context), []
        stop = max(0, end - self.depth)
        while end > stop and node.children is not None:
            child = node.children.get(context[end - 1])
            if child is None:
                break
            shared = _shared(child, context, end, end - stop)
            found.append((len(context) - end + shared, child))
            if shared < child.length:
                break
            node = child
            end -= shared
        return found

    def _follow(self, text: Text, node: _Node | None, limit: int, min_token_prob: float) -> Continuation:
        """The most frequent follower of `text`, whose node is given, then that of the text so continued, and so on.

        What occurred once is followed to wherever that occurrence leads; else contexts are cut to `depth` tokens.
        """
        length, prob, score = len(text), 1.0, 0.0
        start = len(text)
        while node is not None and limit > 0:
            if node.total == 1:
                at = node.end + node.above
                text.extend(node.text[at : at + limit])
                score += prob * min(limit, len(node.text) - at)
                break
            prob *= node.share_of_best
            if prob < min_token_prob:
                break
            text.append(node.best)
            score += prob
            limit -= 1
            length = min(length + 1, self.depth)
            node = self._find(text, length)
        return Continuation(tuple(text[start:]), score)

    def _find(self, text: Text, length: int) -> _Node | None:
        """The node of the last `length` tokens as a context; None if nothing ever followed them."""
        node, end = self._root, len(text)
        stop = end - length
        while end > stop:
            child = None if node.children is None else node.children.get(text[end - 1])
            if child is None:
                return None
            n = min(child.length, end - stop)
            if n > 1 and child.text[child.end - n : child.end] != text[end - n : end]:
                return None
            node = child
            end -= n
        return node


def _shared(node: _Node, text: Text, end: int, most: int) -> int:
    """How many tokens of the node's edge stand before `end`, looking back at most `most`. The first is known to."""
    length = min(node.length, most)
    if length == 1 or node.text[node.end - length : node.end] == text[end - length : end]:
        return length
    return next(i for i in range(1, length) if node.text[node.end - 1 - i] != text[end - 1 - i])


def _join(parent: _Node, node: _Node) -> None:
    """Let `node`'s only child take its place, if nothing but that child's contexts is left in it."""
    children = _children(node)
    if len(children) == 1:
        (child,) = children.values()
        if child.total == node.total:
            child.end += node.length  # in the child's text, too, the node's edge comes next
            child.length += node.length
            child.above = node.above
            _children(parent)[child.text[child.end - 1]] = child
    elif not children:
        node.children = None


def _children(node: _Node) -> dict[int, _Node]:
    return {} if node.children is None else node.children
