"""The examples of docs/write-a-mask.md and docs/write-a-policy.md, as a user would have them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gpu_side.metrics import StateCollector
from gpu_side.state import ServiceState
from protocol.errors import PolicyError
from protocol.messages import FUSED_MODULES, LinearRequest
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.policy.placement import load_policy
from tee_side.protect.masks.mask import Masked, RowMask
from tee_side.protect.masks.registry import find_mask
from tee_side.protect.randomness import Randomness
from tests.kit.masks import SHAPES, apply, supported
from tests.kit.model import SavedModel, assemble, token_ids
from tsqp.cli.main import command

Models = Callable[..., SavedModel]

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
POLICIES = ("my_policy.toml", "my_policy.py")
NEW_TOKENS = 12


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder with the files, outside of the project; not the current one."""
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def _mask(home: Path, **options: int) -> RowMask:
    mask = find_mask(str(home / "my_row_mask.py"))(**options)
    assert isinstance(mask, RowMask)
    return mask


def _blocks(page: str) -> list[tuple[str, str]]:
    """Return language and text of the fenced blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```([\w{}]*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_page_for_operators_names_all_metrics_and_events() -> None:
    page = (DOCS / "operate/metrics.md").read_text(encoding="utf-8")
    state = ServiceState()
    state.counters.methods["Matmul"].outcomes["OK"] += 1
    metrics = {
        sample.name for family in StateCollector(state).collect() for sample in family.samples
    }
    named = set(re.findall(r"`(tsqp_\w+)", page))
    assert {re.sub("_(bucket|count|sum|created)$", "", name) for name in metrics} == named
    said = re.compile(r"\blog\.(?:info|warning|error|exception)\(\s*\"(\w+)\"")
    sources = [
        p.read_text("utf-8") for d in ("gpu_side", "tee_side") for p in (ROOT / d).rglob("*.py")
    ]
    sources.append((ROOT / "tsqp/service_attestation.py").read_text("utf-8"))
    events = {event for source in sources for event in said.findall(source)}
    events |= set(re.findall(r'\bwarn\("(\w+)"', "".join(sources)))
    assert {"ready", "no_more_clients", "service_quarantined", "liar_unknown"} <= events
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for name in listed if not name.startswith("tsqp_")} == events


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("write-a-mask.md", "my_row_mask.py"),
        ("write-a-policy.md", "my_policy.toml"),
        ("write-a-policy.md", "my_policy.py"),
        ("write-an-attack.md", "my_attack.py"),
    ],
)
def test_a_page_shows_the_file_as_it_is(page: str, file: str) -> None:
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    shown = (DOCS / page).read_text(encoding="utf-8")
    assert f"```{{literalinclude}} examples/{file}\n" in shown
    assert f"(examples/{file})" in shown
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize(
    "page",
    ["write-a-mask.md", "write-a-policy.md", "write-an-attack.md", "policies.md", "leakage.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    for link in links:
        assert (DOCS / link).exists(), link


# ---------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("options", [{}, {"shield_rows": 1, "reflections": 1}, {"reflections": 64}])
def test_the_mask_is_undone_and_hides_what_it_got(
    home: Path, rows: int, options: dict[str, int]
) -> None:
    mask, generator = _mask(home, **options), torch.Generator().manual_seed(rows)
    x_TI = torch.randn(rows, 48, generator=generator)
    weight_OI = torch.randn(96, 48, generator=generator)
    randomness = Randomness(bytes(32))
    masked, again = (mask.mask(x_TI, randomness) for _ in range(2))
    (sent_RI,) = masked.sent
    shield_rows = options.get("shield_rows", 4)
    assert sent_RI.shape == (rows + shield_rows, 48)
    assert sent_RI.dtype == x_TI.dtype
    plain_TO = x_TI @ weight_OI.t()
    result_TO = _reply(masked, weight_OI)
    error = (result_TO - plain_TO).abs().max() / plain_TO.abs().max()
    assert result_TO.shape == plain_TO.shape
    assert error < mask.tolerance
    # No row crosses as it was, and no two calls alike.
    assert torch.cdist(sent_RI, x_TI).min() > 1e-2
    assert not torch.isclose(again.sent[0], sent_RI).any(dim=-1).all()


def _reply(masked: Masked, weight_OI: torch.Tensor) -> torch.Tensor:
    (sent_RI,) = masked.sent
    result: torch.Tensor = masked.unmask(sent_RI @ weight_OI.t())
    return result


def test_the_mask_does_what_every_mask_must(home: Path) -> None:
    """The contract suite runs over docs/examples as well; here the file is a user's."""
    mask = _mask(home)
    operators = supported(type(mask))
    assert operators == [*FUSED_MODULES, "lm_head"]
    for operator in operators:
        for rows in SHAPES.values():
            assert apply(mask, operator, rows, Randomness()).error <= mask.tolerance


def test_tsqp_masks_shows_the_file(home: Path) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(
        command, ["masks", str(home / "my_row_mask.py")]
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith("row-reflection: a row mask (file), broken\n")
    assert "reflections = 3 (integer, at least 1 and at most 64)" in result.output


# ------------------------------------------------------------------------------ the policies


@pytest.mark.parametrize("file", POLICIES)
def test_a_policy_generates_what_the_reference_does(
    home: Path, file: str, saved_model: Models
) -> None:
    model, prompt = saved_model("llama"), token_ids(9)
    tee = assemble(model.directory, load_policy(str(home / file)))
    assert tee.greedy(prompt, NEW_TOKENS) == model.greedy(prompt, NEW_TOKENS)
    assert tee.channel is not None
    assert tee.channel.requests


def test_the_toml_policy_sends_what_it_says(home: Path, saved_model: Models) -> None:
    policy = load_policy(str(home / "my_policy.toml"))
    tee = assemble(saved_model("llama").directory, policy)
    engine = tee.engine()
    engine.add(token_ids(9), max_new_tokens=3, eos_token_ids=frozenset())
    assert tee.channel is not None
    engine.step()
    assert tee.channel.requests == []  # prefill stays
    engine.step()
    requests = [r for r in tee.channel.requests if isinstance(r, LinearRequest)]
    assert len(requests) == len(tee.channel.requests) == 4 * 2
    assert {r.layer_idx for r in requests} == {1, 2}  # the first layer stays
    rows = {r.module_names[0]: r.hidden_states.shape[0] for r in requests}
    assert rows == {"q_proj": 5, "o_proj": 5, "gate_proj": 9, "down_proj": 9}


def test_the_python_policy_sends_what_it_says(home: Path, saved_model: Models) -> None:
    policy = load_policy(str(home / "my_policy.py"))
    tee = assemble(saved_model("llama").directory, policy)
    engine = tee.engine()
    engine.add(token_ids(9), max_new_tokens=3, eos_token_ids=frozenset())
    engine.step()
    assert tee.channel is not None
    requests = [r for r in tee.channel.requests if isinstance(r, LinearRequest)]
    assert [(r.layer_idx, r.hidden_states.shape[0]) for r in requests] == [(2, 9 + 4)] * 4
    assert len(requests) == len(tee.channel.requests)


def test_a_policy_that_does_not_fit_a_model_is_refused(home: Path, saved_model: Models) -> None:
    with pytest.raises(PolicyError, match="policy my-policy: qkv_proj: got layers 1-"):
        assemble(saved_model("llama", num_hidden_layers=1).directory, str(home / "my_policy.toml"))


@pytest.mark.parametrize("page", ["write-a-mask.md", "write-a-policy.md"])
def test_what_the_pages_quote_is_what_explain_prints(home: Path, page: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        command, ["explain", "demo", "--policy", str(home / "my_policy.toml")]
    )
    assert result.exit_code == 0, result.output
    (quoted,) = [block for language, block in _blocks(page) if not language]
    printed = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in quoted.splitlines():
        wanted = " ".join(line.split())
        assert any(wanted in one for one in printed), line


def test_the_example_of_what_services_must_be_is_read() -> None:
    policy = AppraisalPolicy.load(DOCS / "examples/service.toml")
    assert policy.mode == "production"
    assert policy.snp is not None
    assert policy.nvidia is not None
