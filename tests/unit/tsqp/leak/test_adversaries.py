"""Who has the requests to both services of a policy with shares reads everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.model.config import read_config
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.model import SavedModel
from tests.unit.tsqp.leak.leaks import Models, tiny
from tests.unit.tsqp.leak.runs import PROMPTS, run
from tests.unit.tsqp.leak.test_play import played
from tsqp.cli.program import model_directory
from tsqp.lab.leak.adversaries import together
from tsqp.lab.leak.attacks.direct import NearestEmbedding
from tsqp.lab.leak.attacks.vocabulary import PlainMatching
from tsqp.lab.leak.model import PolicyLeak, Rate, Report
from tsqp.lab.leak.table import attacks_grid, refusals, summary_grid
from tsqp.lab.leak.trace import Trace, TraceError
from tsqp.lab.leak.words import above, verdict

TEXTS = (
    "Once upon a time there was a little girl who had a red ball.",
    "Tom went to the park with his mom and saw a big brown dog.",
)
PROMPT = 17


def _attacked(folder: Path, *, shares_in_the_clear: bool) -> Report:
    """Attack two-server on the demo model, with two prompts of 17 tokens."""
    directory = model_directory("demo")
    ids = [Tokenizer(directory).encode(text)[:PROMPT] for text in TEXTS]
    assert [len(one) for one in ids] == [PROMPT, PROMPT]
    return run(
        directory,
        folder,
        ["two-server"],
        [NearestEmbedding],
        prompts=tuple(map(tuple, ids)),
        new_tokens=4,
        shares_in_the_clear=shares_in_the_clear,
    )


def _prompts_read(found: PolicyLeak) -> Rate:
    (attack,) = found.runs
    (score,) = attack.scores
    assert score.prompt is not None
    return score.prompt


def test_an_observer_of_links_without_keys_reads_every_token(tmp_path: Path) -> None:
    """One service reads none of them, beyond what is right by chance."""
    service, observer, colluding = _attacked(tmp_path, shares_in_the_clear=True).policies
    assert [one.adversary for one in (service, observer, colluding)] == [
        "service",
        "observer of all links",
        "colluding services",
    ]
    for found in (observer, colluding):
        assert _prompts_read(found) == Rate(hits=2 * PROMPT, n=2 * PROMPT)
        assert found.above_chance
        assert found.standing == "clear"
        assert found.reconstruction is not None
    assert not service.above_chance
    assert [one.service for one in service.runs] == [1, 2]


def test_an_observer_of_encrypted_links_sees_lengths_and_timing(tmp_path: Path) -> None:
    report = _attacked(tmp_path, shares_in_the_clear=False)
    service, observer, colluding = report.policies
    assert observer.nothing == "the links are encrypted: their observer sees lengths and timing"
    assert (observer.runs, observer.excess_high, observer.best) == ((), None, None)
    assert observer.lengths == service.lengths
    assert verdict(observer) == observer.nothing
    assert verdict(colluding).startswith("reads 100%")
    # No policy promises anything against services that collude; a row says what they read.
    assert not any("colluding" in line for line in above(report, 0.9))
    rows = [row.cells[0] for row in summary_grid(report).rows]
    assert rows == [
        "two-server (service)",
        "two-server (observer of all links)",
        "two-server (colluding services)",
    ]
    grid = attacks_grid(colluding)
    assert grid is not None
    assert grid.title == "two-server (colluding services): every attack and place"
    assert not any("service" in row.cells[1] for row in grid.rows)
    assert refusals(observer) == []


def test_an_observer_of_links_without_keys_is_above_what_may_be_read(tmp_path: Path) -> None:
    lines = above(_attacked(tmp_path, shares_in_the_clear=True), 0.9)
    assert [line.partition(":")[0] for line in lines] == [
        "policy two-server (observer of all links)"
    ]


@pytest.mark.usefixtures("here")
def test_attacks_on_the_clear_read_services_that_collude(
    saved_model: Models, tmp_path: Path
) -> None:
    model = tiny(saved_model, vocab_size=128)
    prompts = tuple(tuple(one % 128 for one in ids) for ids in PROMPTS)
    attacks = [NearestEmbedding, PlainMatching]
    policies = ["two-server", "quantized-clear"]
    report = run(model.directory, tmp_path, policies, attacks, prompts=prompts)
    _, _, colluding, clear = report.policies
    assert colluding.adversary == "colluding services"
    assert [(one.attack, one.scores) for one in colluding.runs] == [
        (one.attack, one.scores) for one in clear.runs
    ]


def test_requests_that_do_not_belong_together_are_refused(
    model: SavedModel, tmp_path: Path
) -> None:
    recording = played(model, "two-server", tmp_path)
    (session, *_) = recording.sessions
    first, second = session.traces
    config = read_config(model.directory)
    (whole,) = together(replace(recording, sessions=(session,)), config).sessions[0].traces
    assert [call.where for call in whole.calls] == [call.where for call in first.calls]
    for summed, one, two in zip(whole.calls, first.calls, second.calls, strict=True):
        assert (summed.rows == one.rows + two.rows).all()
    short = replace(session, traces=(Trace(first.messages[:-1]), second))
    with pytest.raises(TraceError, match="shares: got 1 requests to the second service alone"):
        together(replace(recording, sessions=(short,)), config)
