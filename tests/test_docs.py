"""The documents point at what is there, and speak of the project alone."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "demo/README.md",
        ROOT / "benchmarks/README.md",
        ROOT / "benchmarks/plan.md",
    ]
)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FOLDERS = "benchmarks|commands|conf|demo|docs|policies|reports|runtime|testing|tests|training"
CODE_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)`")
PAGES_ELSEWHERE = ["README.md", "benchmarks/README.md", "benchmarks/plan.md", "demo/README.md"]
SITE = ["mkdocs.yml", "docs", *PAGES_ELSEWHERE]
NETWORK = re.compile(r"""<(?:script|link|img)\b[^>]*(?:src|href)=["'](?:https?:)?//""")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_that_is_named_is_there(page):
    for path in CODE_PATH.findall(page.read_text()):
        pattern = re.sub("GROUP|NAME", "*", path.rstrip("/"))  # whichever
        assert list(ROOT.glob(pattern)), f"{path} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_begin_behind_an_empty_line(page):
    """A code host makes a list of the lines all the same; the site runs them together."""
    before, code = "", False
    for line in page.read_text().splitlines():
        code ^= line.startswith(("```", "````"))
        if not code and re.match(r"(?:[-*]|\d+\.) ", line):
            assert re.match(r"$|\s|[-*] |\d+\. ", before), f"no empty line before: {line}"
        before = line


def build(folder, site):
    """What mkdocs says of the site in `folder`, and its exit status.

    Not told to be quiet, it counts warnings, which end a strict build.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr, done.returncode


def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    said, status = build(ROOT, tmp_path)
    assert status == 0, said
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    sources = [page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md")]
    expected = {str(page.with_suffix(".html")) for page in sources}
    expected |= {"index.html", "benchmarks.html", "demo-model.html", "predictions.html", "404.html"}
    assert {str(page.relative_to(tmp_path)) for page in pages} == expected
    assert [page.name for page, text in pages.items() if NETWORK.search(text)] == []


def test_the_site_is_refused_for_each_broken_link(tmp_path):
    broken = [
        ("docs/log.md", "[x](nowhere.md)", "nowhere.md"),
        ("docs/log.md", "[x](../runtime/nowhere.py)", "nowhere.py"),
        ("docs/log.md", "[x](design.md#heading-1)", "heading-1"),
        ("README.md", "[x](#heading-2)", "heading-2"),
        ("benchmarks/README.md", "[x](../docs/design.md#heading-3)", "heading-3"),
        ("docs/lost.md", "# A page in no menu", "lost.md"),
    ]
    for name in SITE:
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy)
    for folder in [*ROOT.glob("[a-z]*/"), ROOT / "benchmarks/results"]:
        copy = tmp_path / folder.relative_to(ROOT)
        if folder.is_dir() and not copy.exists():
            copy.symlink_to(folder)
    for page, line, _ in broken:
        with (tmp_path / page).open("a") as file:
            file.write(f"\n{line}\n")
    said, status = build(tmp_path, tmp_path / "site")
    assert status == 1
    assert [what for _, _, what in broken if what not in said] == []
    assert f"{len(broken)} warnings" in said


def test_the_pages_of_reference_are_what_the_generator_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/reference")
    from generate import pages  # a script beside the pages, no part of the package

    for name, text in pages().items():
        written = (ROOT / "docs/reference" / name).read_text()
        assert written == text, f"docs/reference/{name} is out of date: run `make references`"


def test_keys_of_the_root_are_told_with_those_that_they_hold(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/reference")
    from from_config import root_rows

    @dataclass(frozen=True)
    class Inner:
        """seconds: how long."""

        seconds: float = 1.5

    @dataclass(frozen=True)
    class Outer:
        """Words before the keys.

        loud: whether it says so, on lines
            of its own.
        """

        loud: bool = False
        wait: Inner = Inner()

    assert list(root_rows(Outer)) == [
        ("`loud`", "bool", "`false`", "whether it says so, on lines of its own."),
        ("`wait.seconds`", "float", "`1.5`", "how long."),
    ]
