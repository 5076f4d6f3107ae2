"""`residency chat`: a conversation at a terminal, or of the lines of a pipe."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residency.commands.terminal import Cfg, Overrides, err, out, user_errors

if TYPE_CHECKING:
    from residency.runtime.dialogue import Dialogue

PROMPT = "> "
HELP = """\
/retry       answer the last message again
/undo        take the last turn back; the next message follows on the one before
/reset       take all turns back
/save FILE   write the messages, as a line that workload.path reads
/help        this
ctrl-C stops an answer, ctrl-D ends."""


def chat(
    overrides: Overrides = None,
    system: Annotated[
        str, typer.Option("--system", help="A message of the system before all others.")
    ] = "",
    cfg: Cfg = False,
) -> None:
    """Talk to the model: streaming text, and after each answer a line of what it cost.

    Only what is new since the last turn is prefilled. `/help` lists the commands, /undo and /retry
    among them; ctrl-D ends. Lines of a pipe are answered one by one:
    `residency chat < questions.txt`.
    """
    with user_errors():
        from residency.conf import build_engine
        from residency.conf.commands import compose_chat
        from residency.conf.progress import loading_bar

        config = compose_chat(overrides or [])
        if cfg:
            out.print(config.yaml(), end="", markup=False, soft_wrap=True)
            return
        with loading_bar(err) as progress:
            engine = build_engine(config, progress)
        with engine:
            workload: Any = config.workload
            dialogue = workload.run(
                engine, lambda note: err.print(note, markup=False), system=system
            )
            for line in _lines():
                if not _handled(dialogue, line):
                    _answer(lambda *hooks, text=line: dialogue.say(text, *hooks))


def _lines() -> Iterator[str]:
    """What is typed, or comes through a pipe; empty lines are nothing."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if text := line.strip():
                out.print(PROMPT + text, style="bold", markup=False, soft_wrap=True)
                yield text
        return
    import readline  # noqa: F401  (input() edits lines and remembers them where it is loaded)

    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text:
            yield text


def _handled(dialogue: Dialogue, line: str) -> bool:
    """Whether the line was a command, and is done."""
    if not line.startswith("/"):
        return False
    from residency.policies.errors import ResidencyError

    command, _, rest = line.partition(" ")
    try:
        if command not in COMMANDS:
            out.print(f"{command}: there is no such command", markup=False)
            out.print(HELP, markup=False)
        else:
            COMMANDS[command](dialogue, rest.strip())
    except ResidencyError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
    return True


def _answer(say: Callable[[Callable[[str], None], Callable[[], bool]], Any]) -> None:
    """One answer, and what it cost; a refusal or a second ctrl-C ends the answer alone."""
    from residency.policies.errors import WorkloadError
    from residency.runtime.dialogue import status

    try:
        with _interrupts() as interrupted:
            turn = say(lambda piece: print(piece, end="", flush=True), interrupted)
    except WorkloadError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        out.print("\nbroken off; the next turn prefills the conversation again")
    else:
        print()
        out.print(status(turn), style="dim", markup=False, soft_wrap=True)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, the first ctrl-C is only noted, so that an answer ends between two steps and what is
    cached stays; a second one interrupts at once.
    """
    asked = threading.Event()

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _retry(dialogue: Dialogue, rest: str) -> None:
    text = dialogue.undo()
    _answer(lambda *hooks: dialogue.say(text, *hooks))


def _undo(dialogue: Dialogue, rest: str) -> None:
    text = dialogue.undo()
    out.print(f"taken back: {text}", markup=False, soft_wrap=True)


def _reset(dialogue: Dialogue, rest: str) -> None:
    dialogue.reset()
    out.print("all turns are taken back")


def _save(dialogue: Dialogue, rest: str) -> None:
    from residency.policies.errors import OutputError
    from residency.runtime.results import require_writable, write_whole

    if not rest:
        raise OutputError("/save: name a file, as in /save talk.jsonl")
    file = Path(rest).expanduser()
    require_writable(file, "/save")
    line = {"id": file.stem, "messages": dialogue.messages}
    write_whole({file: json.dumps(line, ensure_ascii=False).encode() + b"\n"}, "/save")
    out.print(f"saved {len(dialogue.messages)} messages", markup=False)


def _help(dialogue: Dialogue, rest: str) -> None:
    out.print(HELP, markup=False)


COMMANDS: dict[str, Callable[[Dialogue, str], None]] = {
    "/retry": _retry,
    "/undo": _undo,
    "/reset": _reset,
    "/save": _save,
    "/help": _help,
}
