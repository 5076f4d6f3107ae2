"""The terminal side of `residency chat`: interrupts, and what an answer that fails leaves."""

import signal

import pytest

from residency.commands.chat import _answer, _interrupts
from residency.conf import build_engine, compose
from residency.policies.errors import WorkloadError

SHORT = ("workload=chat", "device=cpu", "workload.max_new_tokens=6", "workload.temperature=0")


def test_the_first_interrupt_is_noted_and_the_second_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "words"),
    [(WorkloadError("too long"), "error: too long"), (KeyboardInterrupt(), "broken off")],
)
def test_an_answer_that_fails_does_not_end_the_chat(capsys, error, words):
    def fails(*hooks):
        raise error

    _answer(fails)
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


def test_a_dialogue_goes_on_behind_interrupts_of_both_kinds():
    config = compose(SHORT)
    with build_engine(config) as engine:
        dialogue = config.workload.run(engine)
        stopped = dialogue.say("Hello there", interrupted=lambda: True)
        assert stopped.report.finish == "interrupted"
        assert len(stopped.report.token_ids) == 1
        assert [m["role"] for m in dialogue.messages] == ["user", "assistant"]

        def break_off(piece):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            dialogue.say("And then?", on_text=break_off)
        assert len(dialogue.messages) == 2
        turn = dialogue.say("And then?")
        assert turn.cached == 0 and len(dialogue.messages) == 4
        later = dialogue.say("More")
        assert later.cached > turn.new
        dialogue.reset()
        assert dialogue.messages == []
