"""What docs/ says of our programs holds: links, and what it lists."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_side.metrics import StateCollector
from gpu_side.state import ServiceState
from tests.kit.rows import each_row
from tsqp.catalogue import masks_page

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


def test_the_readme_is_a_page_and_the_documentation_says_each_thing_once() -> None:
    def lines(page: Path) -> int:
        return len(page.read_text(encoding="utf-8").splitlines())

    assert lines(ROOT / "README.md") <= 150
    assert sum(lines(page) for page in PAGES if page.is_relative_to(DOCS)) <= 3000


def test_the_page_on_masks_is_what_the_classes_say() -> None:
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    assert page == masks_page(), "stale: make docs"


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
