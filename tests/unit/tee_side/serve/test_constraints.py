"""What vLLM's fields say of the next token, beside a grammar."""

from dataclasses import dataclass, field

import torch

from tee_side.serve.constraints import TokenRules, all_but
from tests.kit.rows import each_row

VOCABULARY, END = 6, 0


@dataclass
class Only:
    """A grammar that allows one token."""

    token_id: int
    taken: list[int] = field(default_factory=list)

    def copy(self) -> "Only":
        return Only(self.token_id, [*self.taken])

    def hide(self, scores_V: torch.Tensor) -> torch.Tensor:
        return scores_V.masked_fill(torch.arange(VOCABULARY) != self.token_id, float("-inf"))

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)


@each_row(
    ("rules", "said", "allowed"),
    [
        (TokenRules(), [], [0, 1, 2, 3, 4, 5]),
        (TokenRules(hidden_V=all_but([1, 3], VOCABULARY)), [], [1, 3]),
        (TokenRules(minimum=2, end_ids=frozenset({END, 5})), [1], [1, 2, 3, 4]),
        (TokenRules(minimum=2, end_ids=frozenset({END, 5})), [1, 1], [0, 1, 2, 3, 4, 5]),
        (TokenRules(unwanted=[(2,), (1, 3)]), [], [0, 1, 3, 4, 5]),
        (TokenRules(unwanted=[(2,), (1, 3)]), [4, 1], [0, 1, 4, 5]),
        (TokenRules(unwanted=[(1, 1, 3)]), [1], [0, 1, 2, 3, 4, 5]),
        (TokenRules(Only(4)), [], [4]),
        # Where nothing would be left, the weaker rules give way.
        (TokenRules(unwanted=[(1,)], hidden_V=all_but([1], VOCABULARY)), [], [1]),
        (TokenRules(Only(END), minimum=2, end_ids=frozenset({END})), [], [END]),
        (TokenRules(Only(4), hidden_V=all_but([1], VOCABULARY)), [], [4]),
    ],
)
def test_a_token_is_allowed_by_all_rules(
    rules: TokenRules, said: list[int], allowed: list[int]
) -> None:
    one = rules.copy()
    for token_id in said:
        one.advance(token_id)
    scores_V = torch.arange(VOCABULARY, dtype=torch.float32)
    hidden_V = one.hide(scores_V)
    assert hidden_V.isfinite().nonzero()[:, 0].tolist() == allowed
    assert hidden_V[allowed].tolist() == allowed
    # They are told apart by which they are.
    assert len({one, rules}) == 2
    # Neither the scores nor another sample of the request knows of it.
    assert scores_V.isfinite().all()
    assert not rules._ids
    if isinstance(one.grammar, Only) and isinstance(rules.grammar, Only):
        assert (one.grammar.taken, rules.grammar.taken) == (said, [])
