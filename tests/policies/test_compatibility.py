"""Which combinations are refused, why, and with what mend; plugins' parts are judged alike."""

import pytest
import torch
from command import assert_one_line

from residency.conf import build_engine, compose
from residency.policies.base import Capability, Need, Part
from residency.policies.compatibility import conflicts
from residency.policies.errors import ConfigError
from residency.policies.prefill.always_stream import AlwaysStream
from residency.policies.prefill.demand import Demand

HOST = ("decode=cpu",)
NONE = ("cache=none", "prefill=always_stream")
CONFLICTS = [
    (
        (*HOST, "prefill=demand", "cache=none"),
        "prefill=demand with decode=cpu",
        "mend it with decode=gpu",
    ),
    ((*HOST, "prefill=hit_d2d"), "prefill=hit_d2d with decode=cpu", "mend it with decode=gpu"),
    ((*HOST, "cache=lru"), "cache=lru with decode=cpu", "mend it with decode=gpu"),
    ((*HOST, "cache=lrfu"), "cache=lrfu with decode=cpu", "mend it with decode=gpu"),
    (("decode.cpu_layers=[3]",), "decode.cpu_layers=[3]", "3 MoE layers, 0 to 2", "layer 3"),
    (("decode.cpu_layers=3",), "decode.cpu_layers=3", "all 3", "mend it with decode.cpu_layers=0"),
    (("decode.cpu_layers=-1",), "decode.cpu_layers=-1", "a list of layers"),
    (("decode=hybrid", "decode.max_host=0"), "decode.max_host=0.0", "above 0"),
    (("decode=hybrid", "decode.warmup=0"), "decode.warmup=0", "mend it with decode.warmup=8"),
    (("cache=none",), "prefill=demand with cache=none", "mend it with cache=lru"),
    (
        ("cache=none", "prefill=hit_d2d"),
        "prefill=hit_d2d with cache=none",
        "mend it with cache=lru",
    ),
    (("prefill.max_tokens=0",), "prefill.max_tokens=0", "mend it with prefill.max_tokens=256"),
    (("prefill.chunk_tokens=0",), "prefill.chunk_tokens=0", "from 1"),
    (("prefill.chunk_tokens=99999999999999999999",), "prefill.chunk_tokens=9", "to 1048576"),
    (("prefill.ring=0",), "prefill.ring=0", "from 1"),
    (("prefill.groups=0",), "prefill.groups=0", "from 1"),
    (("prefill.groups=9",), "prefill.groups=9", "only 8 experts", "mend it with prefill.groups=8"),
    (("cache.slots=1",), "cache.slots=1", "needs 2 experts", "mend it with cache.slots=2"),
    (
        ("cache.slots=25",),
        "cache.slots=25",
        "24 experts (3 layers x 8)",
        "mend it with cache.slots=all",
    ),
    (("cache.slots=0",), "cache.slots=0", "above 0"),
    (("cache.slots=-3",), "cache.slots=-3", "above 0"),
    (("cache.slots=101%",), "cache.slots=101%", "above 0"),
    (("cache.slots=many",), "cache.slots=many", "above 0"),
    (("cache.slots='\u00b2'",), "cache.slots=\u00b2", "above 0"),
    (("cache.scope=layer",), "cache.scope=layer", "global or per_layer", "cache.scope=global"),
    (
        ("cache.scope=per_layer", "cache.slots=7"),
        "cache.slots=7",
        "shared out evenly among 3 MoE layers",
        "mend it with cache.slots=6",
    ),
    (
        ("cache.scope=per_layer", "cache.slots=3"),
        "cache.slots=3",
        "2 experts in slots at once, in each of 3 layers' slots",
        "mend it with cache.slots=6",
    ),
    (
        ("cache.admit_prefill=false", "cache.admit_decode=false"),
        "cache.admit_prefill=false with cache.admit_decode=false",
        "no expert would ever enter a slot",
        "mend it with cache.admit_decode=true",
    ),
    (("cache=lfu", "cache.half_life=-1"), "cache.half_life=-1", "a number of tokens"),
    (("cache=belady",), "cache=belady", "only the replay of a recorded run", "cache=lru"),
    (("cache.decay=2",), "cache.decay=2.0", "from 0 (LFU) to 1 (LRU)"),
    (("cache.decay=nan",), "cache.decay=nan", "from 0 (LFU) to 1 (LRU)"),
    (("cache.history=gone",), "cache.history=gone", "kept or reset", "mend it with cache.history"),
    (("model.dtype=int8",), "model.dtype=int8", "bfloat16", "mend it with model.dtype=auto"),
    (("model.context=513",), "model.context=513", "1 to 512", "mend it with model.context=0"),
    (("model.context=-1",), "model.context=-1", "1 to 512"),
    (("device.threads=-1",), "device.threads=-1", "mend it with device.threads=0"),
    (("device.threads=99999999999",), "device.threads=9", "mend it with device.threads=0"),
    (("workload.max_new_tokens=0",), "workload.max_new_tokens=0", "at least 1"),
    (("workload.temperature=-1",), "workload.temperature=-1.0", "0 or more"),
    (("workload.temperature=nan",), "workload.temperature=nan", "0 or more"),
    (("workload.top_p=0",), "workload.top_p=0.0", "above 0"),
    (("workload.temperature=0", "workload.top_p=0.5"), "workload.top_p=0.5", "greedy"),
    (("workload.seed=-1",), "workload.seed=-1", "mend it with workload.seed=0"),
    (("workload.seed=99999999999999999999",), "workload.seed=9", "2^63 - 1"),
]
FINE = [
    (),
    HOST,
    NONE,
    ("cache=lru", "cache.slots=2"),
    ("cache=s3fifo", "cache.scope=per_layer", "cache.slots=6", "cache.admit_prefill=false"),
    ("cache.scope=per_layer", "cache.slots=30%"),
    ("cache=lru", "cache.slots=all", "prefill=hit_d2d", "prefill.groups=8"),
    ("prefill.otherwise=hit_d2d",),
]


def over(checkpoint, overrides):
    return compose(["model=folder", f"model.path={checkpoint}", "device=cpu", *overrides])


@pytest.mark.parametrize("case", CONFLICTS, ids=lambda case: " ".join(case[0]))
def test_refused_with_the_reason_and_the_mend(checkpoint, case):
    overrides, *words = case
    found = [str(conflict) for conflict in over(checkpoint, overrides).conflicts()]
    about = [text for text in found if words[0] in text]
    assert len(about) == 1, found
    assert_one_line(about[0], *words)


@pytest.mark.parametrize("case", CONFLICTS, ids=lambda case: " ".join(case[0]))
def test_no_engine_is_built_over_a_conflict(checkpoint, case):
    with pytest.raises(ConfigError):
        build_engine(over(checkpoint, case[0]))


@pytest.mark.parametrize("case", CONFLICTS, ids=lambda case: " ".join(case[0]))
def test_the_mend_mends(checkpoint, case):
    """Following the mends, one at a time, ends at a combination without conflicts."""
    overrides = list(case[0])
    for _ in range(4):
        found = list(over(checkpoint, overrides).conflicts())
        if not found:
            return
        overrides.append(found[0].mend)
    pytest.fail(f"still refused after four mends: {overrides}")


@pytest.mark.parametrize("overrides", FINE, ids=" ".join)
def test_what_can_work_is_not_refused(checkpoint, overrides):
    assert list(over(checkpoint, overrides).conflicts()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_is_refused_where_there_is_none():
    (conflict,) = compose(["device=cuda"]).conflicts()
    assert_one_line(str(conflict), "device=cuda", "sees 0 CUDA devices", "mend it with device=cpu")


class Singer(Part):
    group = "workload"
    needs = (Need("carries_sound", because="it sings", mend="device=air"),)


class Air(Part):
    group = "device"
    provides = frozenset({"carries_sound"})


class Vacuum(Part):
    group = "device"


class Shy(AlwaysStream):
    needs = (Need("is_dark", because="it is shy", mend="device=night"),)


class HearsItself(Singer):
    provides = frozenset({"carries_sound"})


def test_a_plugins_own_capability_is_matched():
    assert list(conflicts([Singer(None), Air(None)])) == []
    (conflict,) = conflicts([Singer(None), Vacuum(None)])
    assert conflict.keys == (f"workload={Singer(None).name}", f"device={Vacuum(None).name}")
    assert (conflict.reason, conflict.mend) == ("it sings", "device=air")


def test_a_part_may_provide_what_it_needs():
    assert list(conflicts([HearsItself(None), Vacuum(None)])) == []


def test_needs_of_a_mode_within_a_mode_are_checked():
    demand = Demand(Demand.Config(), otherwise=Shy(Shy.Config()))
    provider = Air(None)
    provider.provides = frozenset({Capability.RETAINS, Capability.DECODES_FROM_SLOTS})
    (conflict,) = conflicts([demand, provider])
    assert conflict.reason == "it is shy"


def test_faults_of_a_mode_within_a_mode_are_found():
    demand = Demand(Demand.Config(), otherwise=AlwaysStream(AlwaysStream.Config(ring=0)))
    assert ["prefill.ring=0"] == [key for fault in demand.faults() for key in fault.keys]
