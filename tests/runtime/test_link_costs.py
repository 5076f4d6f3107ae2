"""Link costs from marks: what a timeline says is what is measured, kept and read back."""

import json

import pytest
from conftest import tiny_engine

from residency.policies.errors import ConfigError, OutputError
from residency.policies.prefill import Costs
from residency.runtime.cost_profile import profile_path, read_profile, write_profile
from residency.runtime.lanes import Mark
from residency.runtime.link_costs import ChunkTimes, LayerTimes, LinkCosts


def copy(begin, end):
    mark = Mark(at=end)
    mark.begin = Mark(at=begin)
    return mark


def chunk(num_tokens=16, gap=3.0, answer=1.0, num_layers=4, experts=5, expert_s=2.0):
    """Layers that wait: routes, the host's answer, copies, then `gap` until the next routes."""
    now, times = 0.0, ChunkTimes(num_tokens, [])
    for _ in range(num_layers):
        routes = Mark(at=now)
        fetched = copy(now + answer, now + answer + experts * expert_s)
        times.layers.append(LayerTimes(routes, None, fetched, fetched))
        times.copies.append((experts, fetched))
        now = fetched.at + gap
    return times


def test_a_timeline_gives_its_costs():
    costs = LinkCosts()
    assert costs.of(16) is None
    costs.observe(chunk())
    assert costs.of(16) is None  # it may have been held up
    costs.observe(chunk())
    assert costs.of(16) == Costs(expert_s=2.0, idle_s=4.0)  # the gap and the answer


def test_copies_that_end_before_the_layer_begins_leave_the_layer_idle():
    routes = [Mark(at=float(at)) for at in (0, 10, 20)]
    layers = [LayerTimes(mark, last=copy(mark.at - 5, mark.at - 4)) for mark in routes]
    assert ChunkTimes(8, layers).gap_s() == 10


def test_a_host_that_takes_longer_than_the_copies_is_no_idle_time():
    costs, held_up = LinkCosts(), chunk(answer=1.0, experts=1, expert_s=2.0, gap=8.0)
    for times in held_up.layers:  # routes at r, copies to r + 3, issued at r + 7, routes at r + 11
        times.heard_s, times.issued_s = times.routes.at, times.routes.at + 7.0
    assert (held_up.gap_s(), held_up.host_s()) == (4.0, 7.0)
    for _ in range(2):
        costs.observe(held_up)
    assert costs.of(16) == Costs(expert_s=2.0, idle_s=5.0, host_s=6.0)
    assert LinkCosts(costs.as_dict()).of(4096).host_s == 6.0  # it does not grow with the chunk
    assert LinkCosts(costs.as_dict(), beside=False).of(16) == Costs(2.0, 0.0)


def test_an_answer_behind_copies_that_still_ran_tells_nothing():
    ahead, first = copy(0, 6), copy(6, 8)
    layers = [LayerTimes(Mark(at=5.0), ahead, first, first)]
    assert ChunkTimes(8, layers).answer_s() is None
    for routes in (5.0, 7.0):  # the link was idle before the first copy, from 6.0 on
        layers = [LayerTimes(Mark(at=routes), ahead, copy(7.5, 9), copy(7.5, 9))]
        assert ChunkTimes(8, layers).answer_s() == 7.5 - routes


def test_lengths_between_those_measured_lie_on_a_line():
    costs = LinkCosts()
    for num_tokens, gap in ((16, 2.0), (64, 4.0)):
        costs.observe(chunk(num_tokens, gap, answer=0.0))
        costs.observe(chunk(num_tokens, gap + 90, answer=5.0))
    idle = [costs.of(num_tokens).idle_s for num_tokens in (8, 16, 40, 64, 128)]
    assert idle == [2.0, 2.0, 3.0, 4.0, 8.0]


def test_recent_chunks_count_and_one_that_was_held_up_does_not():
    costs = LinkCosts()
    for expert_s in (1.0, 3.0, 3.0, 99.0, 3.0, 2.0):
        costs.observe(chunk(expert_s=expert_s))
    assert costs.of(16).expert_s == 3.0


def test_a_layer_that_was_held_up_does_not_count():
    held_up = chunk(num_layers=6)
    for times in held_up.layers[3:]:
        for mark in (times.routes, times.last):
            mark.at += 1000.0
    assert held_up.gap_s() == 3.0


def test_costs_survive_a_file(tmp_path):
    costs = LinkCosts()
    for _ in range(2):
        costs.observe(chunk())
    assert costs.of(16)
    file = tmp_path / "a" / "b.json"
    assert write_profile(file, costs.as_dict())
    assert LinkCosts(read_profile(file)).of(16) == costs.of(16)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"version": 99}', '{"version": 2, "costs": {"expert_s": -1.0}}',
     '{"version": 2, "costs": {"expert_s": "x", "answer_s": 0.0, "gap_s": {}, "host_s": {}}}'],
)  # fmt: skip
def test_a_damaged_file_is_none(tmp_path, content):
    file = tmp_path / "costs.json"
    file.write_text(content)
    assert read_profile(file) is None
    assert read_profile(tmp_path / "absent.json") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not write_profile(tmp_path / "file" / "costs.json", {"expert_s": 1.0})


def test_a_file_for_each_device_and_kind_of_expert(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = (profile_path("NVIDIA H200", what) for what in ("bf16 9437184", "nvfp4 2764800"))
    assert one == tmp_path / "residency" / "costs" / "nvidia-h200-bf16-9437184.json"
    assert one != other
    assert json.dumps(str(other))


def test_a_file_that_the_user_names_must_be_one_of_costs(checkpoint, tmp_path):
    damaged = tmp_path / "costs.json"
    damaged.write_text("{}")
    with pytest.raises(ConfigError, match=r"prefill\.profile=.*holds no measured costs"):
        tiny_engine(checkpoint, "prefill=auto", f"prefill.profile={damaged}")
    with pytest.raises(OutputError, match=r"prefill\.profile"):
        tiny_engine(checkpoint, "prefill=auto", f"prefill.profile={tmp_path}/absent/costs.json")
    file = tmp_path / "new.json"
    with tiny_engine(checkpoint, "prefill=auto", f"prefill.profile={file}") as engine:
        for _ in range(2):
            engine.generate([3, 4, 5], max_new_tokens=1)
    assert read_profile(file) is not None
