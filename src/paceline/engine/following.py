"""Was a draft right? The text that comes tells, whether the draft was verified or not.

A draft is followed until the text leaves it or it ends. What a lookup found is followed even where it was not used: its
tokens are right exactly if verification would have accepted them, so its rates cost nothing to keep.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.proposal import Proposal
from paceline.core.tree import ROOT
from paceline.engine.acceptance import Kind
from paceline.engine.rests import Rest

MOST_FOLLOWED = 4  # drafts of one kind at a time: the next ones mostly go on like the last


@dataclass(slots=True, eq=False)
class Followed:
    """A draft of a sequence. `asked`: tokens that were wanted; a chain that ends before was not sure enough.

    `num_used`: nodes that were verified; 0 if it was not used. Of a lookup's, `price`: seconds of their rows, and
    `worth`: seconds that one more token is worth.
    """

    kind: Kind
    draft: Proposal
    asked: int
    num_used: int
    price: float = 0.0
    worth: float = 0.0
    num_right: int = 0
    wrong: bool = False
    _node: int = ROOT

    def follow(self, tokens: Iterable[int]) -> bool:
        """The text goes on; whether all is known of this draft now."""
        for token in tokens:
            if not self.draft.children(self._node):
                break
            child = self.draft.child_with(self._node, token)
            if child is None:
                self.wrong = True
                return True
            self._node = child
            self.num_right += 1
        if self.draft.children(self._node):
            return False
        self.wrong = self.num_right < self.asked
        return True


@dataclass(slots=True, eq=False)
class Standing:
    """What was chosen for the last steps stands for some more. `left`: so many.

    counts[kind]: tokens taken of a draft; price: seconds of a drafted row; worth: seconds that a token is worth.
    """

    left: int
    price: float
    worth: float
    counts: dict[Kind, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Watch:
    """One sequence as the policy knows it. `known[method]`: tokens that a method has read."""

    num_seen: int
    following: list[Followed] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    num_known: int = 0  # to all methods
    rest: Rest = field(default_factory=Rest)  # of its lookups
    standing: "Standing | None" = None

    def settle(self, text: Sequence[int]) -> list[Followed]:
        """The text as it now is; drafts of which all is known."""
        new, self.num_seen = text[self.num_seen :], len(text)
        if not new or not self.following:
            return []
        done = [followed for followed in self.following if followed.follow(new)]
        if done:
            self.following = [followed for followed in self.following if followed not in done]
        return done

    def add(self, followed: Followed) -> None:
        """A draft of what comes next. Of many that are not used, the first go on to be followed."""
        alike = sum(other.kind[0] == followed.kind[0] for other in self.following)
        if followed.num_used or alike < MOST_FOLLOWED:
            self.following.append(followed)

    def behind(self, method: str) -> int:
        """Tokens that a method has yet to read."""
        return self.num_seen - max(self.known.get(method, 0), self.num_known)
