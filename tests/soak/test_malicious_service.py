"""The verdict is about lies that were told, of what was there to tell them of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.lies import CROSS_SESSION, INIT_LIES, NEEDY, REORDERED
from tests.soak.malicious_service import LIES, Tally
from tests.soak.victims import Outcome


def tally() -> Tally:
    """Return one of all lies, each refused."""
    found = Tally(spared=1, spared_right=1)
    for lie in (*LIES, *INIT_LIES):
        error, right = (lie.endings[0].__name__, False) if lie.endings else (None, True)
        outcome = Outcome(error, right, seconds=0.0)
        found.see(lie, outcome)
        found.note(lie, outcome, 1.0)
    found.had.update(lie.name for lie in NEEDY)
    return found


def test_all_told_and_refused_passes() -> None:
    assert tally().missing() == []
    assert tally().passed(timed=True)


def accepted(found: Tally) -> None:
    found.see(LIES[0], Outcome(None, right=False, seconds=0.0))


def of_a_deadline(found: Tally) -> None:
    found.note(LIES[0], Outcome("DeadlineExceededError", right=False, seconds=0.0), 1.0)


def of_a_wrong_result_by_init(found: Tally) -> None:
    found.note(INIT_LIES[0], Outcome("VerificationError", right=False, seconds=0.0), 1.0)


def stuck(found: Tally) -> None:
    found.stuck[LIES[0].name] += 1


def never_told(found: Tally) -> None:
    found.told[LIES[-1].name] = 0


def never_told_by_init(found: Tally) -> None:
    found.told[INIT_LIES[-1].name] = 0


def never_swapped(found: Tally) -> None:
    found.had[REORDERED.name] = 0


def never_of_another_session(found: Tally) -> None:
    found.had[CROSS_SESSION[1].name] = 0


def nobody_spared(found: Tally) -> None:
    found.spared = found.spared_right = 0


def spared_and_wrong(found: Tally) -> None:
    found.spared += 1


@pytest.mark.parametrize(
    "fault",
    [
        accepted,
        of_a_deadline,
        of_a_wrong_result_by_init,
        stuck,
        never_told,
        never_told_by_init,
        never_swapped,
        never_of_another_session,
        nobody_spared,
        spared_and_wrong,
    ],
)
def test_what_went_wrong_or_was_not_tried_fails(fault: Callable[[Tally], None]) -> None:
    found = tally()
    fault(found)
    assert not found.passed(timed=False)


def test_late_fails_where_time_is_judged() -> None:
    found = tally()
    found.note(LIES[0], Outcome("ProtocolError", right=False, seconds=3.0), 1.0)
    assert found.passed(timed=False)
    assert not found.passed(timed=True)
