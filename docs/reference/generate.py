"""Write docs/reference/: what the typed config and the command line say of themselves.

`make references` runs it; a test holds the pages to what it would write. Options of installed
plugins are left out, so that the pages follow from this checkout alone.
"""

from __future__ import annotations

from pathlib import Path

from from_cli import cli_page
from from_config import config_page

FOLDER = Path(__file__).resolve().parent


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    return {"config.md": config_page(), "cli.md": cli_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
