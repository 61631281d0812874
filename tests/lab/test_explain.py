"""`tsqp explain`: equal to the traffic of real runs, and complete for every policy."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protocol.errors import SettingsError
from protocol.messages import Timing
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.words import OPERATORS, PHASES, Operator, Phase
from tests.kit.model import Models, assemble, finish, token_ids, with_results
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.lab.explain.explanation import Explanation, explain
from tsqp.lab.explain.traffic import Cost, Headers
from tsqp.operator_table import OperatorTable, OperatorTotals
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")
PROMPT = 21
EVERY: tuple[Operator, ...] = (*OPERATORS, "segment")
# What `LoopbackChannel` puts into headers.
LOOPBACK_TIMING = Timing(queue_us=1, compute_us=2)


def _explain(directory: Path, policy: Policy | str, **settings: Any) -> Explanation:
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    given: dict[str, Any] = {"context": 30, "prompt_tokens": 20, "step_tokens": 512, **settings}
    return explain(directory, chosen, **given)


@each_row(
    ("policy", "kind"),
    [
        *((load_policy(name), "llama") for name in builtin_policies()),
        # Verified floats cross without their bias.
        (with_results("attention-in-tee", "freivalds"), "qwen2"),
    ],
    ids=lambda row: str(row[0].name),
)
def test_rpcs_and_bytes_are_those_of_a_run(policy: Policy, kind: str, saved_model: Models) -> None:
    model, table = saved_model(kind, num_hidden_layers=2), OperatorTable()
    tee = model.tee(policy, observer=table)
    engine = tee.engine()
    engine.add(token_ids(PROMPT), max_new_tokens=2, eos_token_ids=frozenset())
    given = {"context": PROMPT + 1, "prompt_tokens": PROMPT}
    for phase in PHASES:
        table.totals.clear()
        asked = [len(channel.requests) + 1 for channel in tee.channels]
        engine.step()
        headers = Headers(first_request_id=asked[0] if asked else 1, timing=LOOPBACK_TIMING)
        found = _explain(model.directory, policy, headers=headers, **given)
        costs = dict.fromkeys(EVERY, Cost())
        for row in found.operators:
            told = getattr(row, phase)
            costs[row.operator] += told.cost if told else Cost()
        for name in EVERY:
            one = table.totals.get(name, OperatorTotals())
            sizes = {"bytes_sent": one.bytes_sent, "bytes_received": one.bytes_received}
            assert costs[name] == Cost(rpcs=one.round_trips, **sizes), name
        assert getattr(found, phase) == sum(costs.values(), start=Cost())
    if policy.services:
        assert all(channel.traffic.round_trips > 0 for channel in tee.channels)


def test_a_long_prompt_is_counted_in_chunks(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    tee = assemble(directory, "published")
    engine = tee.engine(step_tokens=8)
    engine.add(token_ids(PROMPT), max_new_tokens=1, eos_token_ids=frozenset())
    finish(engine)
    assert tee.channel is not None
    headers = Headers(first_request_id=1, timing=LOOPBACK_TIMING)
    found = _explain(directory, "published", prompt_tokens=PROMPT, step_tokens=8, headers=headers)
    traffic = tee.channel.traffic
    # Three steps, of which only the last asks for logits.
    assert found.prefill.rpcs == traffic.round_trips == 3 * (9 * 3 + 1) + 1
    assert found.prefill.bytes_sent == traffic.bytes_sent
    assert found.prefill.bytes_received == traffic.bytes_received


@each_row(
    ("name", "services", "key", "padded"),
    [
        ("tee-only", 0, None, None),
        ("cloak", 1, "feature-rotation", None),
        ("float-noise", 1, None, ("prefill", "decode")),
        ("shielded", 1, None, ("decode",)),
        ("shielded-prefill", 1, None, ("prefill", "decode")),
        ("dealt", 2, None, ("decode",)),
    ],
)
def test_needs(
    name: str,
    services: int,
    key: str | None,
    padded: tuple[Phase, ...] | None,
    tmp_path: Path,
) -> None:
    # Without weights and a tokenizer.
    shutil.copy(DEMO / "config.json", tmp_path)
    needs = _explain(tmp_path, name).needs
    assert (needs.services, needs.key) == (services, key)
    assert [pads.phases for pads in needs.pads] == ([padded] if padded else [])


@each_row("name", ["context", "prompt_tokens"])
def test_more_tokens_than_the_model_can_take_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="got 513, expected 1 to 512"):
        _explain(DEMO, "published", **{name: 513})


@each_row("policy", ["shielded", "tee-only"])
def test_the_command_says_in_80_columns_or_json_what_was_found(policy: str) -> None:
    given = ["explain", "demo", "--policy", policy, "--context", "30", "--prompt-tokens", "20"]
    said = CliRunner().invoke(command, given, env={"COLUMNS": "80"}).stdout
    found = _explain(DEMO, policy)
    assert max(map(len, said.splitlines())) <= 80
    assert all(f" {row.operator} " in said for row in found.operators)
    assert ("computed in the TEE", "verified against")[found.needs.services] in said
    as_json = CliRunner().invoke(command, [*given, "--json"]).stdout
    assert Explanation.model_validate_json(as_json, strict=False) == found
