"""Many turns and many engines in one process: what is held stays the same, and counters come out.

benchmarks/endurance.py does the same for longer on a trained model.
"""

import gc
import itertools
import weakref

import pytest
import torch
from conftest import tiny_engine
from test_benchmarks import BENCHMARKS, script

from residency.conf import build_engine, compose
from residency.runtime.banks import Banks
from residency.runtime.engine import Engine
from residency.runtime.offload import OffloadRuntime

MB = 1 << 20


@pytest.fixture(scope="module")
def endurance():
    module = script(BENCHMARKS / "endurance.py")
    module.LONGEST_ANSWER = 6
    return module


def test_turns_leave_a_process_as_large_as_it_was(checkpoint, endurance):
    with tiny_engine(checkpoint, "cache.slots=6", "prefill=demand") as engine:
        rows = endurance.endure(engine, 60)
        repeated = endurance.rounds(engine, 12, 4)
    assert max(row["held_tokens"] for row in rows) > 400, "turns continue one another"
    assert any(a["held_tokens"] > b["held_tokens"] for a, b in itertools.pairwise(rows))
    assert all(row["lookups"] and row["bytes"] for row in rows)
    warm = rows[endurance.warm(rows) :]
    for key in ("tensors", "threads", "open_files"):
        assert max(row[key] for row in warm) == min(row[key] for row in warm), key
    assert endurance.growth(rows, "rss_bytes") * len(rows) < 8 * MB
    # The first round finds what is left to be taken once.
    assert repeated[-1]["rss_bytes"] - repeated[0]["rss_bytes"] < MB // 2


def standing():
    """How many of what an engine is made of there are in this process."""
    gc.collect()
    return sum(isinstance(each, (Engine, OffloadRuntime, Banks)) for each in gc.get_objects())


def test_engines_leave_nothing_behind(checkpoint, endurance):
    alive, before = weakref.WeakSet(), standing()
    words = ["model=folder", f"model.path={checkpoint}", "device=cpu", "cache.slots=6"]
    config = compose(words)

    def make():
        engine = build_engine(config)
        alive.update((engine, engine.runtime, engine.banks, engine.model))
        return engine

    rows = endurance.builds(make, 50)
    gc.collect()
    assert list(alive) == []
    assert standing() <= before, "other tests may hold some"
    warm = rows[endurance.warm(rows) :]
    for key in ("tensors", "threads", "open_files"):
        assert max(row[key] for row in warm) == min(row[key] for row in warm), key
    assert endurance.growth(rows, "rss_bytes") * len(rows) < 16 * MB


def test_growth_is_noticed(endurance):
    leaking = [{"rss_bytes": 1000 + 7 * n} for n in range(40)]
    assert endurance.growth(leaking, "rss_bytes") == pytest.approx(7)
    assert endurance.growth([{"x": 100 * (n < 5)} for n in range(40)], "x") == pytest.approx(0)


@pytest.mark.gpu
def test_engines_leave_nothing_on_a_gpu_or_pinned(checkpoint, monkeypatch):
    driver, calls = torch.cuda.cudart(), {"register": 0, "unregister": 0}

    class Counting:
        def __getattr__(self, name):
            return getattr(driver, name)

        def cudaHostRegister(self, *args):
            calls["register"] += 1
            return driver.cudaHostRegister(*args)

        def cudaHostUnregister(self, *args):
            calls["unregister"] += 1
            return driver.cudaHostUnregister(*args)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Counting())
    model = ["model=folder", f"model.path={checkpoint}", "model.dtype=float32"]
    held = []
    for _ in range(20):
        with build_engine(compose([*model, "device=cuda", "cache.slots=6"])) as engine:
            engine.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)
        del engine
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert calls["register"] == calls["unregister"] > 0
    assert max(held[4:]) == min(held[4:])
