"""A prompt's early tokens pass by the slots: what it leaves there, and that no logit changes."""

import pytest
import torch
from conftest import tiny_engine

from residency.conf import build_engine, compose
from residency.policies.step import Phase

PROMPT = list(range(3, 23))
OTHER = list(range(30, 60))
MODES = {
    "demand": ("prefill=demand", "prefill.chunk_tokens=8"),
    "always_stream": ("prefill=always_stream", "prefill.chunk_tokens=8"),
    "hit_d2d": ("prefill=hit_d2d", "prefill.chunk_tokens=8"),
}
CACHES = [
    ("cache=lru", "cache.prefill_tokens=0"),
    ("cache=lrfu", "cache.prefill_tokens=11", "cache.prefill_weight=0.1"),
]


def logits(engine):
    seen = []
    engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.fixture(scope="module")
def resident(checkpoint):
    with tiny_engine(checkpoint, "cache.slots=all", "prefill.chunk_tokens=8") as engine:
        return logits(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES, ids=" ".join)
def test_logits_are_those_of_all_experts_resident(checkpoint, resident, mode, cache):
    with tiny_engine(checkpoint, *cache, "cache.slots=5", *MODES[mode]) as engine:
        for _ in range(2):  # cold, then warm
            assert torch.equal(logits(engine), resident)
        engine.runtime.check()


@pytest.mark.parametrize(
    ("mode", "cache"), [*((mode, "lrfu") for mode in MODES), ("demand", "lru")]
)
def test_a_prompt_of_which_nothing_counts_leaves_slots_and_history_alone(checkpoint, mode, cache):
    few = (f"cache={cache}", "cache.slots=7", "cache.prefill_tokens=0", *MODES[mode])
    with tiny_engine(checkpoint, *few) as engine:
        engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        pool = engine.runtime.pool
        kept = {"slots": pool.id_of, **pool.policy.state()}
        before = {name: tensor.clone() for name, tensor in kept.items()}
        report = engine.generate(OTHER, max_new_tokens=1)
        for name, tensor in kept.items():
            assert torch.equal(tensor[:-1], before[name][:-1]), name
        prefill = report.phases[0]
        assert prefill.evictions == prefill.bytes["fetch"] == 0


def test_only_the_last_tokens_experts_are_referenced_and_admitted(checkpoint):
    few = ("cache=lru", "cache.slots=all", "cache.prefill_tokens=3", *MODES["demand"])
    with tiny_engine(checkpoint, *few) as engine:
        routes = engine.record_routes()
        engine.generate(PROMPT, max_new_tokens=1)
        last = routes._table_NLK[len(PROMPT) - 3 : len(PROMPT)].long()
        space = engine.architecture.space
        ids = (last + torch.arange(space.num_layers)[:, None] * space.num_experts).unique()
        pool = engine.runtime.pool
        assert torch.equal(pool.slot_of[:-1].ge(0).nonzero().flatten(), ids)
        assert torch.equal(pool.policy.keys[:-1].nonzero().flatten(), ids)


@pytest.mark.parametrize("batch", [1, 2])
def test_each_chunk_is_told_how_much_of_its_prompt_follows(checkpoint, batch):
    seen = []
    model = ["model=folder", f"model.path={checkpoint}", "device=cpu"]
    config = compose([*model, "cache.slots=all", "prefill.chunk_tokens=8"])
    with build_engine(config, batch=batch) as engine:
        real = engine.runtime.layer

        def layer(index, call):
            if index == 0 and engine.runtime._phase is Phase.PREFILL:
                seen.append((len(call.ids_TK), engine.runtime.tokens_behind))
            return real(index, call)

        engine.runtime.layer = layer
        engine.generate_batch([PROMPT] * batch, max_new_tokens=2)
    assert seen == [(8, 12), (8, 4), (4, 0)] * batch
