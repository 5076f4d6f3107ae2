"""The documents point at what is there, and speak of the project alone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "demo/README.md",
        ROOT / "benchmarks/README.md",
    ]
)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    targets = [target for target, _ in LINK.findall(page.read_text())]
    for target in targets:
        if "://" not in target:
            assert (page.parent / target).exists(), f"{target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_of_another_page_name_one_that_it_has(page):
    for target, anchor in LINK.findall(page.read_text()):
        if anchor and "://" not in target:
            text = (page.parent / target).read_text()
            headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor[1:] in slugs, f"{target} has no heading {anchor}"


def test_every_module_of_the_runtime_is_on_the_map():
    """docs/structure.md names each one."""
    text = (ROOT / "docs/structure.md").read_text()
    modules = {path.stem for path in (ROOT / "runtime").glob("*.py")} - {"__init__"}
    assert {m for m in modules if f"`{m}`" not in text} == set()
