"""Decode that shares its misses between slots and host, whole engines on the CPU."""

import pytest
import torch
from conftest import tiny_engine

from residency.policies.errors import ConfigError

PROMPT = list(range(3, 23))
FEW = ("cache.slots=5", "model.routing=even")  # routes do not hang on a logit's last bit


def run(checkpoint, *overrides, num_new=20):
    """(logits behind each token, decode's rows of the counters)."""
    seen = []
    with tiny_engine(checkpoint, *FEW, *overrides) as engine:
        report = engine.generate(
            PROMPT, max_new_tokens=num_new, ignore_eos=True, on_logits=seen.append
        )
        return torch.stack(seen), [row for row in report.counters if row.phase == "decode"]


@pytest.fixture(scope="module")
def on_slots(checkpoint):
    return run(checkpoint)


@pytest.mark.parametrize("prefill", ["always_stream", "hit_d2d", "demand"])
@pytest.mark.parametrize(
    "decode",
    [("decode=hybrid",), ("decode=hybrid", "decode.cpu_layers=[2]"), ("decode.cpu_layers=1",)],
)
def test_equal_to_decode_from_slots_and_each_expert_is_counted_once(
    checkpoint, on_slots, decode, prefill
):
    logits, rows = run(checkpoint, *decode, f"prefill={prefill}")
    torch.testing.assert_close(logits, on_slots[0], rtol=0, atol=1e-4)
    for row, plain in zip(rows, on_slots[1], strict=True):
        assert row.hits + row.fetched + row.computed == row.lookups == plain.lookups
    assert sum(row.computed for row in rows) > 0


def test_a_layer_on_the_host_takes_no_slots(checkpoint):
    with tiny_engine(checkpoint, *FEW, "decode.cpu_layers=[1]", "prefill=demand") as engine:
        first = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert (engine.runtime.pool.layer_slots(1) == -1).all()
        assert (engine.runtime.pool.layer_slots(0) >= 0).any()
    prefill = [row for row in first.counters if row.phase == "prefill"]
    assert prefill[1].bytes["stream"] > 0 == prefill[1].fetched
    assert prefill[0].bytes["stream"] == 0 < prefill[0].fetched


@pytest.mark.parametrize(("host_s", "computes"), [(1e-6, True), (10.0, False)])
def test_a_slow_host_is_left_alone_and_a_fast_one_is_not(checkpoint, host_s, computes):
    """Under a doctored clock: an expert crosses the link in a millisecond."""
    with tiny_engine(checkpoint, *FEW, "decode=hybrid", "decode.warmup=2") as engine:
        observe = engine.runtime.quotas.observe
        engine.runtime.quotas.observe = lambda step: observe(
            step._replace(fetch_s=step.fetched * 1e-3, host_s=step.computed * host_s)
        )
        engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
        report = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    decode = report.phases[1]
    assert decode.computed == (decode.misses if computes else 0)
    assert decode.misses > 0


def test_layers_that_the_model_does_not_have_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"decode.cpu_layers=\[7\]: the model has 3 MoE layers"):
        run(checkpoint, "decode.cpu_layers=[7]")
