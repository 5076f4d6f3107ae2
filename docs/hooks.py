"""Hooks of mkdocs: some files of other folders are pages too, and links follow them there.

A page links as it does on a code host, by a path from its own folder. On the site a link to a page
leads to that page; one to code, which is not on the site, is only its text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
PAGES = {  # on the site, and in the repository
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "predictions.md": "benchmarks/plan.md",
    "demo-model.md": "demo/README.md",
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    for page, source in PAGES.items():
        text = FRONT_MATTER.sub("", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
        for match in LINK.finditer(text):
            if match["image"] and not match["path"].startswith(f"{DOCS}/"):
                picture = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[3]))
                files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    source = PAGES.get(uri, f"{DOCS}/{uri}")

    def moved(match: re.Match[str]) -> str:
        if "://" in match["path"]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        place = _on_site(target)
        if place is None and match["image"]:
            place = target
        if place is None:  # what is not there at all stays, for mkdocs to warn of
            return match["text"] if (ROOT / target).exists() else match[0]
        path = os.path.relpath(place, posixpath.dirname(uri) or ".")
        return f"{match['image']}[{match['text']}]({path}{match['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def _on_site(target: str) -> str | None:
    """Where a file of the repository is on the site, if it is."""
    for page, source in PAGES.items():
        if target == source:
            return page
    return target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else None
