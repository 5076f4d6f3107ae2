"""The command line in this process: what a call printed, and what a refusal must look like."""

from typer.testing import CliRunner

from residency.cli import app


def residency(*args, **kwargs):
    """The result of `residency ARGS`; anything but a clean exit is raised."""
    result = CliRunner().invoke(app, list(map(str, args)), **kwargs)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def assert_one_line(text, *words):
    assert len(text.strip().splitlines()) == 1, f"not one line: {text!r}"
    for word in words:
        assert str(word) in text, f"{word!r} is not in {text!r}"


def assert_refused(result, *words):
    """Exit status 2 and one line on stderr that holds all `words`."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert_one_line(result.stderr, *words)
