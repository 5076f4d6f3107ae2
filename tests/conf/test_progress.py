"""The loading bar, as a person sees it."""

import io

from rich.console import Console

from residency.conf.progress import loading_bar


def drawn(*calls, terminal=True):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with loading_bar(console) as progress:
        for call in calls:
            progress(*call)
    return console.file.getvalue()


def test_each_part_is_drawn_with_what_is_done_and_its_rate():
    text = drawn(("experts", 1 << 20, 4 << 20), ("experts", 4 << 20, 4 << 20))
    assert "loading experts" in text
    assert "4.2/4.2 MB" in text
    assert "/s" in text or "?" in text


def test_a_part_that_begins_when_another_has_ended():
    text = drawn(("experts", 9, 9), ("pinned", 1, 9), ("pinned", 9, 9))
    assert text.index("loading experts") < text.index("loading pinned")


def test_nothing_is_drawn_where_no_person_looks():
    assert drawn(("experts", 9, 9), terminal=False) == ""
