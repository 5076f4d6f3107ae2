"""Measures conversations: each turn under each prefill mode, modes by turns, from equal states.

A mode's turn begins in the slots that its own turn before left, and those are put back before each
of its runs; the cache goes back to what was cached before the turn, as in any conversation. Of the
runs of a turn all but the last end with the first token; the last one decodes the answer as well,
and the next turn begins where it ended. Slots are emptied before each session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from residency.policies.errors import CapacityError, WorkloadError
from residency.policies.prefill import PrefillMode
from residency.runtime.bench.limits import Resident, everything_resident, link_rate
from residency.runtime.bench.modes import choices_of, model_name, sharing
from residency.runtime.bench.run import COPY_REPEATS, Judge
from residency.runtime.bench.samples import Sample, Samples
from residency.runtime.bench.script import Line, Script
from residency.runtime.bench.turns_report import ConversationReport, Entry, Row
from residency.runtime.conversation import Conversation, Turn
from residency.runtime.engine import Engine
from residency.runtime.environment import environment
from residency.runtime.slot_state import SlotState

WARM_TOKENS = 4  # of an answer before all sessions: a step is run, then captured, then replayed


@dataclass(frozen=True)
class Played:
    """One turn under one mode: the runs to its first token, and the one with the answer."""

    samples: Samples
    turn: Turn


class Play:
    """Plays scripts on an engine. modes: by the names that the report gives them, at least one."""

    def __init__(
        self,
        engine: Engine,
        modes: Mapping[str, PrefillMode],
        room: int,
        repeats: int,
        warmups: int,
    ) -> None:
        self.engine = engine
        self.modes = modes
        self.room = room
        self.repeats, self.warmups = repeats, warmups

    def session(
        self,
        script: Script,
        told: Callable[[Line, dict[str, Played]], None] = lambda line, turns: None,
    ) -> list[dict[str, Played]]:
        """All turns of one, by mode; `told` hears of each."""
        conversation = Conversation(self.engine, room=self.room)
        states = dict.fromkeys(self.modes, SlotState(self.engine.runtime))
        played = []
        for line in script:
            turns, states = self._turn(conversation, line, states)
            told(line, turns)
            played.append(turns)
        return played

    def _turn(
        self, conversation: Conversation, line: Line, states: dict[str, SlotState]
    ) -> tuple[dict[str, Played], dict[str, SlotState]]:
        """What each mode took, and the slots that it left."""
        runtime = self.engine.runtime
        runs: dict[str, list[Turn]] = {label: [] for label in self.modes}
        left: dict[str, SlotState] = {}
        first: Turn | None = None
        for number in range(1, self.warmups + self.repeats + 1):
            last = number == self.warmups + self.repeats
            answer = line.answer if last else line.answer[:1]
            for label, mode in self.modes.items():
                if first is not None:
                    cached = conversation.go_back(first.cached)
                    assert cached == first.cached, f"{cached} tokens are cached, not as before"
                states[label].put_back(runtime)
                with runtime.prefilling(mode):
                    turn = conversation.say(line.prompt, answer=answer)
                first = first or turn
                runs[label].append(turn)
                if last:
                    left[label] = SlotState(runtime)
        return {label: self._played(turns) for label, turns in runs.items()}, left

    def _played(self, turns: list[Turn]) -> Played:
        timed = [Sample.prefill(turn.report, None) for turn in turns[self.warmups :]]
        return Played(Samples(turns[-1].new, tuple(timed)), turns[-1])


def measure_conversations(
    engine: Engine,
    scripts: Sequence[Script],
    modes: Mapping[str, PrefillMode],
    *,
    repeats: int,
    warmups: int,
    keys: Mapping[str, object],
    notes: Sequence[str],
    told: Callable[[str], None],
) -> ConversationReport:
    """modes: beside the engine's own, which comes first. keys: the workload's, for the report."""
    own = engine.policies.prefill
    taking_turns = {own.name: own} | {name: sharing(mode, engine) for name, mode in modes.items()}
    link = link_rate(engine, COPY_REPEATS)
    told(f"link: {link.rate.median / 1e9:.1f} GB/s")
    room = max(len(line.prompt) + len(line.answer) for script in scripts for line in script)
    play = Play(engine, taking_turns, room, repeats, warmups)
    first = scripts[0][0]
    Conversation(engine, room=room).say(first.prompt, answer=first.answer[:WARM_TOKENS])
    played = []
    for script in scripts:
        engine.runtime.forget()
        played.append(play.session(script, lambda *turn: told(_line(*turn))))
    run_notes = engine.runtime.notes()
    told("all resident")
    resident, reason = _resident(engine, scripts, play)
    judge = Judge(engine, link, Resident())
    row_bytes = engine.runtime.plan.row_bytes
    rows = []
    for i, (script, turns) in enumerate(zip(scripts, played, strict=True)):
        for j, (line, by_mode) in enumerate(zip(script, turns, strict=True)):
            compute_s = resident[i][j] if resident else None
            entries = {
                label: Entry(
                    one.samples,
                    one.turn,
                    choices_of(one.turn.report),
                    judge.floor(one.samples, compute_s),
                    row_bytes,
                )
                for label, one in by_mode.items()
            }
            rows.append(Row(line, entries))
    plan = engine.runtime.plan
    return ConversationReport(
        model=model_name(engine.architecture),
        format=engine.architecture.format.name,
        title=f"cache={engine.policies.cache.name} prefill={own.name} "
        f"decode={engine.policies.decode.name}, {plan.num_slots} slots",
        made_up=engine.made_up,
        keys=dict(keys),
        room=room,
        rows=tuple(rows),
        link=link,
        reason=reason,
        whole_stream_s=plan.bank_bytes / link.rate.median,
        load_s=engine.load_s,
        memory=plan.as_dict(),
        environment=environment(engine.device),
        notes=[*engine.notes, *run_notes, *notes],
    )


def _resident(
    engine: Engine, scripts: Sequence[Script], play: Play
) -> tuple[list[list[float]], str]:
    """The fastest times of the same turns with a slot for every expert, by session; or none, and
    why.
    """
    try:
        with everything_resident(engine):
            own = engine.policies.prefill
            held = Play(engine, {own.name: own}, play.room, play.repeats, play.warmups)
            sessions = [held.session(script) for script in scripts]
        least = [[turn[own.name].samples.seconds.least for turn in turns] for turns in sessions]
        return least, ""
    except (CapacityError, WorkloadError) as error:
        return [], f"not every expert could be loaded: {error}"


def _line(line: Line, turns: Mapping[str, Played]) -> str:
    new, cached = next((one.turn.new, one.turn.cached) for one in turns.values())
    times = ", ".join(
        f"{label} {one.samples.seconds.median * 1e3:.1f}" for label, one in turns.items()
    )
    what = f"{line.session}, turn {line.turn}: {new} new behind {cached}"
    return f"{what}: TTFT ms {times}"
