"""Links between the pages, the README and source files lead to a file and a heading that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.rows import each_row

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")],
    key=str,
)


def _prose(page: Path) -> str:
    return re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_readme_is_a_page_and_the_documentation_says_each_thing_once() -> None:
    def lines(page: Path) -> int:
        return len(page.read_text(encoding="utf-8").splitlines())

    assert lines(ROOT / "README.md") <= 150
    assert sum(lines(page) for page in PAGES if page.is_relative_to(ROOT / "docs")) <= 3000
