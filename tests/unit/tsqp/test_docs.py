"""Links lead somewhere; the README is short; masks.md and policies.md are what the code says."""

import json
import re
from pathlib import Path

from gpu_side.handler import ServiceState
from gpu_side.metrics import StateCollector
from tee_side.policy.placement import builtin_policies, load_policy
from tests.kit import models_page
from tests.kit.masks_page import masks_page
from tests.kit.rows import each_row
from tsqp.catalogue import PolicyEntry

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *DOCS.glob("**/*.md")])


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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_the_page_on_masks_is_what_the_classes_say() -> None:
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    assert page == masks_page(), "stale: make docs"


def test_the_page_on_models_is_what_was_recorded_of_the_table() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    assert text == models_page.page(json.loads(models_page.RECORD.read_text())), "stale: make docs"


@each_row("name", builtin_policies())
def test_the_page_on_policies_agrees_with_their_files(name: str) -> None:
    lines = (DOCS / "policies.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    (row,) = (row for row in rows if f"`{name}`" in row[0] and len(row) == 6)
    entry = PolicyEntry(load_policy(name))
    assert (row[-1], "(default)" in row[0]) == (entry.standing, name == "shielded")
    assert all(f"under `{mask}`" in row[3] for mask in entry.described()["masks"])
    assert row[4].replace("no service", "0 services").startswith(str(entry.policy.services))


def test_the_page_for_operators_names_all_metrics_and_events() -> None:
    page = (DOCS / "operate/metrics.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (`\w+[`{].*?) \|", page, re.MULTILINE))
    named = {re.sub("_(total|info)$", "", name) for name in re.findall(r"`(\w+)[`{]", rows)}
    metrics = {family.name for family in StateCollector(ServiceState()).collect()}
    files = [path for side in ("gpu_side", "tee_side") for path in (ROOT / side).rglob("*.py")]
    files += [ROOT / "tsqp/cli/gpu_service.py", ROOT / "tsqp/run/server.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    # `listening`: the event of a thread that accepts clients, and has failed, follows it.
    event = (
        r'\b(?:log\.(?:info|warning|error|exception)|member\.log|self\.log|\(listening,)\W+"(\w+)"'
    )
    assert named == metrics | set(re.findall(event, source))
