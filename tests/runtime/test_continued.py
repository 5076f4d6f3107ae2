"""Prompts that continue what a sequence holds: the same logits as the whole prompt at once."""

import pytest
import torch
from conftest import tiny_engine

from residency.conf import compose
from residency.policies.errors import ConfigError, WorkloadError
from residency.runtime.slot_state import SlotState

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]
PREFIX = 5
# A window shorter than the prompt, a recurrent state, keys of an indexer, plain attention.
MODELS = ("qwen3_moe", "gpt_oss", "qwen3_next", "qwen4_exp")


def logits_of(engine, prompt, **options):
    seen = []
    options = {"max_new_tokens": 3, "ignore_eos": True} | options
    report = engine.generate(prompt, on_logits=seen.append, **options)
    return torch.stack(seen), report


@pytest.mark.parametrize("model_type", MODELS)
def test_a_continued_prompt_has_the_logits_of_the_whole_one(tiny_checkpoint, model_type):
    """The whole prompt in chunks that are cut where the prefix ends."""
    chunks = f"prefill.chunk_tokens={PREFIX}"
    rest = PROMPT[: 2 * PREFIX]
    with tiny_engine(tiny_checkpoint(model_type), chunks, "cache.slots=50%") as engine:
        whole, _ = logits_of(engine, rest)
        engine.generate(rest[:PREFIX], max_new_tokens=1, ignore_eos=True)
        kept = engine.keep()
        assert kept.num_tokens == PREFIX
        continued, report = logits_of(engine, rest[PREFIX:], continued=True)
        assert torch.equal(continued, whole)
        assert report.prompt_tokens == PREFIX
        engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True)  # another sequence between
        engine.put_back(kept)
        again, _ = logits_of(engine, rest[PREFIX:], continued=True)
        assert torch.equal(again, whole)


def test_an_answer_is_continued_too(checkpoint):
    """All but the newest token, which no step has seen."""
    with tiny_engine(checkpoint, "prefill.chunk_tokens=1") as engine:
        first = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
        assert engine.keep().num_tokens == len(PROMPT) + 3
        turn = [first.token_ids[-1], 7, 8]
        continued, _ = logits_of(engine, turn, continued=True)
        whole, _ = logits_of(engine, [*PROMPT, *first.token_ids, 7, 8])
        torch.testing.assert_close(continued, whole)  # decode's kernels are not prefill's


def test_what_cannot_be_continued_is_refused(checkpoint):
    with tiny_engine(checkpoint, "model.context=400") as engine:
        for work in (engine.keep, lambda: engine.generate([3], continued=True)):
            with pytest.raises(WorkloadError, match="nothing to"):
                work()
        engine.generate([3] * 10, max_new_tokens=1)
        kept = engine.keep()
        with pytest.raises(WorkloadError, match=r"390 tokens behind the 10 .* context of 400"):
            engine.generate([3] * 390, max_new_tokens=1, continued=True)
        with pytest.raises(WorkloadError, match="has room for 256; begin it with room=311"):
            engine.generate([3] * 300, max_new_tokens=1, continued=True)
        engine.generate([3] * 10, max_new_tokens=1, room=311)
        with pytest.raises(WorkloadError, match="is gone"):
            engine.put_back(kept)
        engine.generate([3] * 300, max_new_tokens=1, continued=True)
        assert engine.keep().num_tokens == 310


def test_a_generation_that_broke_off_leaves_nothing_to_continue(checkpoint):
    def stop(logits):
        raise ZeroDivisionError

    with tiny_engine(checkpoint) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPT, max_new_tokens=1, on_logits=stop)
        with pytest.raises(WorkloadError, match="broke off"):
            engine.generate([3], continued=True)


@pytest.mark.parametrize("cache", ["lru", "lrfu"])
def test_runs_from_one_state_of_the_slots_are_the_same(checkpoint, cache):
    few = (f"cache={cache}", "cache.slots=5", "prefill=demand")
    with tiny_engine(checkpoint, *few) as engine:
        engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
        state = SlotState(engine.runtime)
        rows = engine.runtime.rows[:5].clone()
        assert state.put_back(engine.runtime) == 0
        first = engine.generate(PROMPT[3:], max_new_tokens=6, ignore_eos=True)
        assert state.put_back(engine.runtime) > 0
        assert torch.equal(engine.runtime.rows[:5], rows)
        engine.runtime.check()
        again = engine.generate(PROMPT[3:], max_new_tokens=6, ignore_eos=True)
        assert again.counters == first.counters
        assert again.token_ids == first.token_ids
        engine.runtime.forget()
        state.put_back(engine.runtime)
        assert torch.equal(engine.runtime.rows[:5], rows)


def test_a_mode_takes_over_the_slots_as_they_are(checkpoint):
    stream, other = (
        compose(["prefill=always_stream", f"prefill.groups={n}"]).policies.prefill for n in (8, 4)
    )
    with tiny_engine(checkpoint, "cache.slots=6", "prefill=demand") as engine:
        own = engine.policies
        engine.generate(PROMPT, max_new_tokens=1)
        held = engine.runtime.pool.id_of.clone()
        with engine.runtime.prefilling(stream):
            assert engine.policies.prefill is stream and engine.policies.cache is own.cache
            totals = engine.generate(PROMPT, max_new_tokens=1).phases[0]
        assert totals.bytes["stream"] == engine.runtime.plan.bank_bytes
        assert torch.equal(engine.runtime.pool.id_of, held)
        assert engine.policies == own
        assert engine.generate(PROMPT, max_new_tokens=1).phases[0].bytes["stream"] == 0
        with pytest.raises(ConfigError, match="groups=4"), engine.runtime.prefilling(other):
            pass
