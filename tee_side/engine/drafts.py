"""Prompt lookup: a draft of the next tokens is what followed the same tokens earlier.

Source: github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Iterable

# Of the runs. One token is found nearly everywhere, and rarely followed by the same.
_LENGTHS = (3, 2)


class Drafts:
    """The tokens of one sequence, and where each run of 3 and of 2 tokens was seen last.

    A token takes the same time however long the text is.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        # By length: a run to the position that follows it; never the run that ends the text, which
        # nothing follows yet.
        self._after: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in _LENGTHS}
        # Read when a draft is wanted first: of a long prompt it takes a while.
        self._unread = list(ids)

    def append(self, token_id: int) -> None:
        """Take the next token of the sequence."""
        self._unread.append(token_id)

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens: those behind the latest earlier end of the longest run.

        Where that is close to the end of the text, the draft goes on with itself: what has repeated
        with a period shorter than a draft is drafted to its full length. Empty where nothing fits.
        """
        for token_id in self._unread:
            end = len(self._ids)
            for length, after in self._after.items():
                if length <= end:
                    after[tuple(self._ids[-length:])] = end
            self._ids.append(token_id)
        self._unread.clear()
        for length, after in self._after.items():
            at = after.get(tuple(self._ids[-length:]))
            if at is not None:
                period = self._ids[at:]
                return [period[i % len(period)] for i in range(most)]
        return []
