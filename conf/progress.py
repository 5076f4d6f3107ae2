"""How far loading is, as a bar in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def loading_bar(console: Console) -> Iterator[Any]:
    """A progress callback (what, done, total bytes), drawn with its rate; gone when loading ends.

    Each part that is loaded has a bar of its own; nothing is drawn where no person looks.
    """
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
                bar.start()  # the part before stopped it
            bar.update(tasks[what], completed=done)
            if done >= total:
                bar.stop()

        yield update
