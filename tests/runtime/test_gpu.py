"""Invariant 1 on a GPU: the same bits over policies, modes, slots, groups, replay and eager."""

import itertools

import pytest
import torch
from conftest import write_checkpoint

from residency.conf import build_engine, compose
from residency.conf.options import option_names
from residency.policies.cache.lru import Lru

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPT = list(range(3, 60))
SIZES = dict(hidden_size=128, head_dim=64, moe_intermediate_size=64)  # as the kernels want them
CACHES = ("cache=lru", "cache=lrfu")
MODES = tuple(f"prefill={name}" for name in option_names("prefill"))
SLOTS = (2, 7, "all")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def make(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("gpu"), "qwen3_moe", num_experts=16, **SIZES)
    base = ["model=folder", f"model.path={folder}", f"model.dtype={request.param}"]
    return lambda *overrides: build_engine(compose([*base, "device=cuda", *overrides]))


def logits(engine, num_new=8):
    """Logits behind every new token of two generations in a row: cold slots, then warm."""
    seen = []
    for prompt in (PROMPT, PROMPT[5:20]):
        engine.generate(prompt, max_new_tokens=num_new, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.fixture(scope="module")
def resident(make):
    with make("cache=lru", "cache.slots=all", "prefill=demand") as engine:
        logits(engine)
        return logits(engine)


@pytest.mark.parametrize(("cache", "mode", "slots"), list(itertools.product(CACHES, MODES, SLOTS)))
def test_equal_to_the_all_resident_run(make, resident, cache, mode, slots):
    with make(cache, mode, f"cache.slots={slots}") as engine:
        assert engine.runtime.capturable
        assert torch.equal(logits(engine), resident)
        assert engine.sequence._graph is not None


@pytest.mark.parametrize(("groups", "ring"), [(1, 1), (3, 2), (16, 4)])
def test_equal_over_groups_and_ring(make, resident, groups, ring):
    with make(
        "prefill=always_stream", f"prefill.groups={groups}", f"prefill.ring={ring}"
    ) as engine:
        assert torch.equal(logits(engine), resident)


def test_graph_replay_equals_eager(make, resident):
    with make("cache.slots=7") as engine:
        engine.runtime.capturable = False
        assert torch.equal(logits(engine), resident)
        assert engine.sequence._graph is None


def test_no_cache_runs_in_the_graph_too(make, resident):
    with make("cache=none", "prefill=always_stream") as engine:
        assert torch.equal(logits(engine), resident)
        assert engine.sequence._graph is not None


def test_kernels_are_close_to_plain_torch(make, resident):
    """In float32: in bfloat16 the order of a sum alone changes which experts are chosen."""
    with make("device.kernels=false") as engine:
        assert not engine.runtime.capturable
        if engine.architecture.dtype == torch.float32:
            torch.testing.assert_close(logits(engine), resident, rtol=0, atol=1e-3)


def test_experts_computed_on_the_host_are_close(make, resident):
    with make("decode=cpu") as engine:
        assert engine.runtime.capturable
        if engine.architecture.dtype == torch.float32:
            torch.testing.assert_close(logits(engine), resident, rtol=0, atol=1e-3)


TARGETS = (
    ("decode=hybrid", "decode.warmup=2"),
    ("decode=hybrid", "decode.cpu_layers=[1]"),
    ("decode.cpu_layers=1",),
    ("decode=cpu",),
)


@pytest.mark.parametrize("target", TARGETS)
def test_host_nodes_in_the_graph_are_close_to_eager_and_to_plain_torch(make, target):
    """With forced routes; in bfloat16 the last bit of a logit may still decide a token, and with
    it all that follows.
    """
    seen, reports = [], []
    slots = () if target == ("decode=cpu",) else ("cache.slots=7",)
    for kernels, graph in (("true", True), ("true", False), ("false", False)):
        with make(*target, *slots, "model.routing=even", f"device.kernels={kernels}") as engine:
            engine.runtime.capturable &= graph
            seen.append(logits(engine, num_new=40))
            assert (engine.sequence._graph is not None) is graph
            reports.append(engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True))
            exact = engine.architecture.dtype == torch.float32
    for other in seen[1:] if exact else ():
        torch.testing.assert_close(seen[0], other, rtol=0, atol=1e-3)
    for report in reports:
        decode = [row for row in report.counters if row.phase == "decode"]
        for row in decode:
            assert row.hits + row.fetched + row.computed == row.lookups
        # How hybrid splits depends on the machine.
        assert "decode=hybrid" in target or sum(row.computed for row in decode) > 0


def test_both_sides_of_a_captured_step_are_timed(make):
    with make("decode=hybrid", "cache.slots=7", "model.routing=even") as engine:
        engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        measured = engine.runtime.quotas.rates.measured()
        for line in (measured.fetched, measured.computed):
            one = line.seconds(torch.ones(1))
            assert (one > 1e-6).all() and (one < 1e-1).all()


RULES = (
    ("cache=lrfu",),
    ("cache.history=reset",),
    ("cache=lfu", "cache.half_life=8"),
    ("cache=fifo",),
    ("cache=s3fifo",),
    ("cache=s3fifo", "cache.scope=per_layer"),
    ("cache=succession", "cache.memory=4"),
    ("cache=least_stale", "cache.admit_prefill=false"),
    ("cache=lru", "cache.scope=per_layer", "cache.admit_decode=false"),
)


@pytest.mark.parametrize("rule", RULES, ids=" ".join)
def test_counts_in_the_graph_equal_the_plain_runs(make, rule):
    """Same routes, same policy: look-ups, hits, misses and evictions agree, bytes too."""
    reports = []
    for kernels in ("true", "false"):
        routed = ("cache.slots=9", "model.routing=even", f"device.kernels={kernels}")
        with make(*rule, *routed) as engine:
            engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
            reports.append(engine.generate(PROMPT[:9], max_new_tokens=20, ignore_eos=True))
    assert reports[0].counters == reports[1].counters


class Plugin(Lru):
    """A policy the kernels do not know: its touch runs as torch operations inside the graph."""

    def touch(self, ids, step):
        super().touch(ids, step)


def test_a_users_policy_runs_inside_the_graph(make, resident):
    with make("cache=lru", "cache.slots=7") as engine:
        policies = engine.policies
        plugin = Plugin(policies.cache.config)
        plugged = type(policies)(plugin, policies.prefill, policies.decode)
        engine._standing.install(plugged, engine.runtime.plan)
        assert torch.equal(logits(engine), resident)
        assert engine.sequence._graph is not None


def test_a_warm_start_counts_what_the_run_before_would_have(make, tmp_path):
    few, file = ("cache=lrfu", "cache.slots=7", "prefill=demand"), tmp_path / "state"

    def decoded(engine):
        report = engine.generate(PROMPT[5:20], max_new_tokens=8, ignore_eos=True)
        return report.token_ids, report.counters

    with make(*few) as engine:
        engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        engine.save_state(file)
        expected = decoded(engine)
    with make(*few, f"cache.warm_start='{file}'") as engine:
        assert decoded(engine) == expected
