"""workload=conversation: its turns are those of the sessions, and its numbers add up."""

import json

import pytest
from command import assert_one_line, assert_refused, residency

from residency.conf import build_engine, compose
from residency.policies.errors import CapacityError, CheckpointError, WorkloadError
from residency.runtime.bench import turns
from residency.runtime.bench.turns_tables import turns_tables
from residency.runtime.chat_template import ChatTemplate
from residency.runtime.sessions.session import read_sessions

PNG = b"\x89PNG\r\n\x1a\n"
FEW = ("sessions=2", "max_turns=2", "max_new_tokens=3", "repeats=2", "warmups=1")
WORKLOAD = ["workload=conversation", *(f"workload.{key}" for key in FEW)]


def composed(folder, *overrides):
    model = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    return compose([*model, *WORKLOAD, *overrides])


def measured(folder, *overrides, told=None):
    config = composed(folder, *overrides)
    with build_engine(config) as engine:
        return config.workload.run(engine, told)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_a_report_has_every_turn_under_every_mode(tiny_checkpoint, model_type):
    lines = []
    report = measured(
        tiny_checkpoint(model_type), "cache.slots=50%", "model.context=500", told=lines.append
    )
    assert len(lines) == 6 and "link" in lines[0]
    result = json.loads(json.dumps(report.as_dict()))
    assert result["kind"] == "conversation"
    assert result["plan"]["modes"] == report.labels == ["demand", "always_stream"]
    names = [one.name for one in read_sessions("")[:2]]
    turns = result["turns"]
    assert [(t["session"], t["turn"]) for t in turns] == [(n, i) for n in names for i in (1, 2)]
    row_bytes = result["memory"]["row_bytes"]
    for turn, row in zip(turns, report.rows, strict=True):
        assert turn["cached_tokens"] + turn["new_tokens"] == len(row.line.prompt)
        assert sum(turn["schedule"]["chunks"]) == turn["new_tokens"]
        assert turn["schedule"]["decode_steps"] == turn["answer_tokens"] - 1 == 2
        for mode in turn["modes"].values():
            assert len(mode["runs"]) == 2 and mode["tpot_s"] > 0
            assert mode["floor"]["own_s"] > 0 and mode["over_own_floor"] > 0
            totals = [run["totals"] for run in mode["runs"]]
            assert totals[0]["lookups"] == totals[1]["lookups"]  # equal states: equal turns
            assert totals[0]["bytes"] == totals[1]["bytes"]
            assert mode["routed_bytes"] == totals[0]["lookups"] * row_bytes
        stream = turn["modes"]["always_stream"]
        assert stream["prefill_bytes"]["stream"] == result["memory"]["bank_bytes"]
    for before, after in ((turns[0], turns[1]), (turns[2], turns[3])):
        assert before["cached_tokens"] == 0
        said = before["new_tokens"] + before["schedule"]["decode_steps"]
        assert after["cached_tokens"] == said
    for label, one in result["sums"].items():
        assert one["ttft_s"] == sum(t["modes"][label]["ttft_s"]["median"] for t in turns)
    assert composed(tiny_checkpoint(model_type)).workload.chart(report).startswith(PNG)
    assert all(table.row_count for table in turns_tables(report))


def test_modes_that_take_turns_count_what_each_would_alone(checkpoint):
    """The slots of one do not depend on its company."""
    modes = ("[always_stream]", "[always_stream,'demand max_tokens=5',in_place]")
    few, many = (
        measured(checkpoint, "cache.slots=9", "prefill=hit_d2d", f"workload.modes={each}")
        for each in modes
    )
    assert few.labels == ["hit_d2d", "always_stream"]
    assert many.labels == ["hit_d2d", "always_stream", "demand", "in_place"]
    for one, other in zip(few.rows, many.rows, strict=True):
        for label in few.labels:
            mine, theirs = one.entries[label], other.entries[label]
            assert mine.turn.report.counters == theirs.turn.report.counters
            assert mine.turn.report.token_ids == theirs.turn.report.token_ids


def test_the_mode_of_the_combination_is_not_run_twice(checkpoint):
    report = measured(checkpoint, "prefill=always_stream", "workload.max_turns=1")
    assert report.labels == ["always_stream"]


def test_a_limit_that_cannot_be_had_is_named(checkpoint, monkeypatch):
    def refuse(engine):
        raise CapacityError("too much")

    monkeypatch.setattr(turns, "everything_resident", refuse)
    report = measured(checkpoint, "workload.max_turns=1")
    assert report.as_dict()["limits"]["reason"] == "not every expert could be loaded: too much"
    assert all(entry.floor is None for row in report.rows for entry in row.entries.values())
    assert composed(checkpoint).workload.chart(report).startswith(PNG)
    assert all(table.row_count for table in turns_tables(report))


def test_answers_are_the_recorded_ones_whatever_the_model_would_say(checkpoint):
    report = measured(checkpoint, "workload.max_turns=1", "workload.repeats=1")
    template = ChatTemplate.of(None, composed(checkpoint).model.architecture.config)
    for row, session in zip(report.rows, read_sessions(""), strict=False):
        asked = [{"role": "user", "content": session.exchanges[0].user}]
        ids, _ = template.answer(asked, session.exchanges[0].assistant, 3)
        assert row.line.answer == ids
        for entry in row.entries.values():
            assert entry.turn.report.token_ids == ids


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["workload.overflow=stop"], ("workload.overflow=stop", "refuse or drop_oldest")),
        (["workload.replies=both"], ("workload.replies=both", "recorded or generated")),
        (["workload.snapshots=2"], ("workload.snapshots=2", "at least 3")),
        (["workload.temperature=1"], ("workload.temperature", "recorded answers are not drawn")),
        (["workload.seed=1"], ("workload.seed", "replies=generated")),
        (["workload.modes=[demand,demand]"], ("demand", "twice")),
        (["workload.modes=['demand ring=3']"], ("ring", "one staging")),
        (["cache=none", "prefill=always_stream", "workload.modes=[demand]"], ("prefill=demand",)),
    ],
)
def test_keys_that_cannot_work_are_refused(checkpoint, overrides, words):
    conflicts = " ".join(map(str, composed(checkpoint, *overrides).conflicts()))
    for word in words:
        assert word in conflicts


def test_answers_of_made_up_weights_are_refused():
    made_up = ["model=qwen3_30b_a3b", *WORKLOAD, "workload.replies=generated"]
    (conflict,) = compose(made_up).conflicts()
    assert_one_line(str(conflict), "made up", "workload.replies=recorded")
    assert not list(compose(made_up[:-1]).conflicts())


def test_refusals_come_before_anything_is_timed(checkpoint, tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text('{"id": "long", "messages": [{"role": "user", "content": "a b c d e f"}]}\nx')
    with pytest.raises(WorkloadError, match="line 2: not JSON"):
        measured(checkpoint, f"workload.path={file}")
    with pytest.raises(WorkloadError, match=r"session mtbench101/CC-687, turn 2: .* context of 50"):
        measured(checkpoint, "model.context=50", told=pytest.fail)
    report = measured(checkpoint, "model.context=50", "workload.overflow=drop_oldest",
                      "workload.sessions=1")  # fmt: skip
    assert [row.line.dropped for row in report.rows] == [0, 1]
    with pytest.raises(CheckpointError, match="no tokenizer"):
        measured(checkpoint, "workload.replies=generated")


def test_run_names_the_command_that_runs_it():
    assert_refused(residency("run", "workload=conversation"), "`residency bench` runs it")
    assert_refused(residency("bench", "workload=chat"), "`residency chat` runs it")


def test_the_demo_model_talks_end_to_end(tmp_path):
    """Through the command, with answers of its own, and what is saved in a chat read back."""
    demo = ("device=cpu", "cache.slots=25%")
    talk = (
        "/help\nHello there\n/retry\n/undo\n/undo\nHi\n/nothing\n/save\n/save {}\n/reset\n/undo\n"
    )
    file = tmp_path / "talk.jsonl"
    short = ("workload.max_new_tokens=3", "workload.temperature=0")
    said = residency("chat", *demo, *short, "--system", "Be kind.", input=talk.format(file))
    assert said.exit_code == 0, said.output
    words = ["> Hello there", "tokens new, 0 cached", "1 tokens new, ", "taken back: Hello"]
    words += ["/nothing: there is no such command", "saved 3 messages", "GiB moved"]
    for word in words:
        assert word in said.stdout
    assert said.stderr.count("there is no turn to take back") == 2
    assert "/save: name a file" in said.stderr
    (session,) = read_sessions(str(file))
    assert session.system == "Be kind." and session.exchanges[0].user == "Hi"
    keys = (f"workload.path={file}", "workload.replies=generated", "workload.max_new_tokens=3")
    once = ("workload.repeats=1", "workload.warmups=0")
    bench = residency(
        "bench", "workload=conversation", *demo, *keys, *once, "--out", tmp_path / "out"
    )
    assert bench.exit_code == 0, bench.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["turns"][0]["session"] == "talk"
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(PNG)
    assert result["turns"][0]["modes"]["demand"]["ttft_s"]["median"] > 0


def test_chat_refuses_a_model_that_cannot_talk(checkpoint):
    refused = residency("chat", "model=qwen3_30b_a3b", "device=cpu", input="")
    assert_refused(refused, "workload=conversation", "model=demo")
    folder = residency("chat", "model=folder", f"model.path={checkpoint}", "device=cpu", input="")
    assert_refused(folder, "no tokenizer there", "model=demo")
