"""What docs/ says of our programs holds: links, lists, and the examples as a user has them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpu_side.metrics import StateCollector
from gpu_side.state import ServiceState
from protocol.errors import PolicyError
from protocol.messages import LinearRequest
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.policy.placement import builtin_policies, load_policy
from tee_side.protect.masks.registry import find_mask
from tee_side.protect.randomness import Randomness
from tests.kit.masks import SHAPES, apply, supported
from tests.kit.model import SavedModel, assemble, token_ids
from tests.kit.rows import each_row
from tsqp.catalogue import masks_page, policy_entry
from tsqp.cli.main import command

Models = Callable[..., SavedModel]

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *DOCS.glob("**/*.md")])
FILES = {
    "write-a-mask.md": ["my_row_mask.py"],
    "write-a-policy.md": ["my_policy.toml", "my_policy.py"],
    "write-an-attack.md": ["my_attack.py"],
}


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        is_there = target.exists() and (not anchor or anchor in anchors(target))
        if "://" not in link and not is_there:
            dead.append(link)
    assert dead == []


def test_the_readme_is_a_page_and_the_documentation_says_each_thing_once() -> None:
    def lines(page: Path) -> int:
        return len(page.read_text(encoding="utf-8").splitlines())

    assert lines(ROOT / "README.md") <= 150
    assert sum(lines(page) for page in PAGES if page.is_relative_to(DOCS)) <= 3000


def test_the_page_on_masks_is_what_the_classes_say() -> None:
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    assert page == masks_page(), "stale: make docs"


@each_row("name", builtin_policies())
def test_the_page_on_policies_agrees_with_their_files(name: str) -> None:
    lines = (DOCS / "policies.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    (about,) = (row for row in cells if f"`{name}`" in row[0] and len(row) == 6)
    entry = policy_entry(load_policy(name))
    assert about[-1] == entry.standing
    for mask in entry.masks:
        assert f"under `{mask}`" in about[3]
    assert about[4].replace("no service", "0 services").startswith(str(entry.services))
    assert ("`tsqp calibrate`" in about[4]) == (entry.arithmetic == "int8")


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
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for name in listed if not name.startswith("tsqp_")} == events


# ---------------------------------------------------------------------------------- docs/examples


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder with the files, outside of the project; not the current one."""
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@each_row("page", list(FILES))
def test_a_page_shows_its_files_and_what_explain_prints(home: Path, page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for file in FILES[page]:
        assert f"```{{literalinclude}} examples/{file}\n" in text
    blocks = re.findall(r"^```([\w{}]*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shown = [block for language, block in blocks if not language]
    if page != "write-an-attack.md":
        given = ["explain", "demo", "--policy", str(home / "my_policy.toml")]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(command, given)
        assert result.exit_code == 0, result.output
        printed = [" ".join(line.split()) for line in result.output.splitlines()]
        for line in shown[0].splitlines():
            wanted = " ".join(line.split())
            assert any(wanted in one for one in printed), line


def test_the_mask_does_what_every_mask_must(home: Path) -> None:
    """The contract suite runs over docs/examples as well; here the file is a user's."""
    mask = find_mask(str(home / "my_row_mask.py"))()
    for operator in supported(type(mask)):
        for rows in SHAPES.values():
            assert apply(mask, operator, rows, Randomness()).error <= mask.tolerance
    given = ["masks", str(home / "my_row_mask.py")]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(command, given)
    assert result.output.startswith("row-reflection: a row mask (file), broken\n")


@each_row(
    ("file", "layers", "rows"),
    [("my_policy.toml", {1, 2}, {5, 9}), ("my_policy.py", {2}, {9 + 4})],
)
def test_a_policy_sends_what_it_says_and_generates_what_the_reference_does(
    home: Path, file: str, layers: set[int], rows: set[int], saved_model: Models
) -> None:
    model, prompt = saved_model("llama"), token_ids(9)
    tee = assemble(model.directory, load_policy(str(home / file)))
    engine = tee.engine()
    engine.add(prompt, max_new_tokens=3, eos_token_ids=frozenset())
    engine.step()
    if file == "my_policy.toml":  # prefill stays
        assert tee.channel is not None
        assert tee.channel.requests == []
        engine.step()
    assert tee.channel is not None
    requests = [one for one in tee.channel.requests if isinstance(one, LinearRequest)]
    assert len(requests) == len(tee.channel.requests) == 4 * len(layers)
    assert {one.layer_idx for one in requests} == layers
    assert {one.hidden_states.shape[0] for one in requests} == rows
    tee = assemble(model.directory, load_policy(str(home / file)))
    assert tee.greedy(prompt, 12) == model.greedy(prompt, 12)


def test_what_does_not_fit_a_model_is_refused(home: Path, saved_model: Models) -> None:
    with pytest.raises(PolicyError, match="policy my-policy: qkv_proj: got layers 1-"):
        assemble(saved_model("llama", num_hidden_layers=1).directory, str(home / "my_policy.toml"))
    policy = AppraisalPolicy.load(EXAMPLES / "service.toml")
    assert policy.mode == "production"
    assert policy.snp is not None
    assert policy.nvidia is not None
