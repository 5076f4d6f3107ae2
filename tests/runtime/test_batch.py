"""Sequences decoded together: each as if it were alone, and none paid for when it is done."""

import itertools

import pytest
import torch
from conftest import tiny_engine, write_checkpoint
from transformers import AutoModelForCausalLM

from residency.conf import build_engine, compose
from residency.policies.errors import CapacityError, ConfigError, WorkloadError
from residency.policies.step import Phase
from residency.runtime import batch_cache
from residency.runtime.report import PhaseTotals
from residency.runtime.sampling import Sampling

LENGTHS = (3, 40, 17, 1, 9, 64, 23, 5)
LIMITS = [6, 3, 1, 8, 12, 2, 7, 4]
TOP_K, NUM_LAYERS = 2, 3
RECURRENT = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
SLIDING = dict(sliding_window=16, head_dim=16)
MODELS = {
    "qwen3_moe": ("qwen3_moe", {}),
    "every layer slides": ("mixtral", SLIDING),
    "recurrent": ("qwen3_next", RECURRENT),
    "some layers slide": (
        "gpt_oss",
        SLIDING
        | dict(
            num_local_experts=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "latent": (
        "deepseek_v3",
        dict(
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ),
}


def prompts(lengths=LENGTHS, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 128, (n,), generator=rng).tolist() for n in lengths]


def batched(folder, *overrides, batch=8):
    base = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cpu"]
    if not {"cache=none", "decode=cpu"}.intersection(overrides):
        base.append("cache.slots=12")  # a step of 8 sequences may need all 8 experts of a layer
    return build_engine(compose([*base, *overrides]), batch=batch)


def run(engine, texts=None, limits=LIMITS, **kwargs):
    """The report, and each sequence's logits [tokens, V]."""
    texts = prompts() if texts is None else texts
    seen = [[] for _ in texts]
    report = engine.generate_batch(
        texts,
        max_new_tokens=limits,
        ignore_eos=True,
        on_logits=lambda index, logits_V: seen[index].append(logits_V),
        **kwargs,
    )
    return report, [torch.stack(own) for own in seen]


def decoded(report):
    return report.phases[list(Phase).index(Phase.DECODE)]


@pytest.mark.parametrize("model", MODELS)
def test_each_sequence_is_what_transformers_computes(tmp_path, model):
    """Against a whole pass of the unchanged model, without a cache, over each sequence alone."""
    model_type, changes = MODELS[model]
    folder = write_checkpoint(tmp_path / model_type, model_type, **changes)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with batched(folder, "prefill.chunk_tokens=16", "cache.slots=16") as engine:
        report, logits = run(engine)
    for prompt, limit, one, own in zip(prompts(), LIMITS, report.sequences, logits, strict=True):
        assert len(one.token_ids) == limit and one.finish == "length"
        ids = torch.tensor([prompt + one.token_ids[:-1]])
        with torch.inference_mode():
            want = judge(ids).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(own, want, rtol=0, atol=1e-4)
        assert one.token_ids == want.argmax(-1).tolist()


def test_prefill_is_that_of_the_sequence_alone_bit_for_bit(checkpoint):
    """And decode within rounding: a GEMM of several rows sums in another order than one of one."""
    with batched(checkpoint, "prefill.chunk_tokens=16") as engine:
        report, logits = run(engine)
        for prompt, limit, one, own in zip(
            prompts(), LIMITS, report.sequences, logits, strict=True
        ):
            alone = []
            single = engine.generate(
                prompt, max_new_tokens=limit, ignore_eos=True, on_logits=alone.append
            )
            assert single.token_ids == one.token_ids
            assert torch.equal(alone[0], own[0])
            torch.testing.assert_close(torch.stack(alone), own, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def resident(checkpoint):
    with batched(checkpoint, "cache=lru", "cache.slots=all", "prefill.chunk_tokens=16") as engine:
        run(engine)
        return torch.cat(run(engine)[1])


CACHES = ("cache=lru", "cache=lrfu")
MODES = ("prefill=always_stream", "prefill=hit_d2d", "prefill=demand")
CHOICES = [
    *((*pair, "cache.slots=9") for pair in itertools.product(CACHES, MODES)),
    ("cache=lrfu", "cache.slots=8"),
    ("cache=none", "prefill=always_stream", "prefill.groups=8", "prefill.ring=1"),
    ("decode=cpu",),
]


@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
def test_bits_do_not_depend_on_the_policies(checkpoint, resident, choice):
    with batched(checkpoint, *choice, "prefill.chunk_tokens=16") as engine:
        run(engine)
        assert torch.equal(torch.cat(run(engine)[1]), resident)


def test_a_finished_sequence_costs_nothing_more(checkpoint):
    with batched(checkpoint) as engine:
        report, _ = run(engine, prompts((5, 6)), [2, 6])
        lookups = decoded(report).lookups - 4 * TOP_K * NUM_LAYERS  # four steps of one sequence
    assert len(report.step_s) == 5
    assert TOP_K * NUM_LAYERS <= lookups <= 2 * TOP_K * NUM_LAYERS


def test_sequences_that_need_the_same_experts_share_them(checkpoint):
    (prompt,) = prompts((12,))
    with batched(checkpoint, "cache.slots=9") as engine:
        alone, together = (run(engine, [prompt] * n, [7] * n)[0] for n in (1, 4))
    assert decoded(together).lookups == decoded(alone).lookups
    assert together.decoded_tokens == 4 * alone.decoded_tokens
    assert len({tuple(one.token_ids) for one in together.sequences}) == 1


def test_experts_computed_on_the_host_are_counted_once_a_step(checkpoint):
    with batched(checkpoint, "decode=cpu") as engine:
        totals = decoded(run(engine)[0])
    assert totals.computed == totals.misses == totals.lookups
    assert totals.bytes["fetch"] == 0


def test_counts_add_up(checkpoint):
    with batched(checkpoint, "cache.slots=9") as engine:
        totals: PhaseTotals = decoded(run(engine)[0])
        row_bytes = engine.runtime.plan.row_bytes
    assert totals.hits + totals.misses == totals.lookups
    assert totals.bytes["fetch"] == totals.misses * row_bytes


def test_all_sequences_of_a_step_share_a_tick(checkpoint):
    with batched(checkpoint) as engine:
        report, _ = run(engine)
        assert int(engine.runtime.clock) + 1 == sum(LENGTHS) + len(report.step_s)
    assert len(report.step_s) == max(LIMITS) - 1


def test_a_stop_token_ends_its_own_sequence_only(checkpoint):
    with batched(checkpoint) as engine:
        free, _ = run(engine, limits=[9] * 8)
        stop = free.sequences[4].token_ids[3]
        stopped, _ = run(engine, limits=[9] * 8, stop_tokens=[stop])
    for one, other in zip(free.sequences, stopped.sequences, strict=True):
        ends = stop in one.token_ids
        want = one.token_ids[: one.token_ids.index(stop)] if ends else one.token_ids
        assert other.token_ids == want
        assert other.finish == ("stop" if ends else "length")
    assert stopped.sequences[4].finish == "stop"


def test_draws_do_not_depend_on_the_company(checkpoint):
    own, others = prompts((9, 12, 7)), prompts((30, 12, 4), seed=1)
    hot = Sampling(temperature=1.5, seed=3)
    with batched(checkpoint) as engine:
        one = run(engine, [own[0], own[1], own[2]], [8, 8, 8], sampling=hot)[0]
        two = run(engine, [others[0], own[1], others[2]], [2, 8, 5], sampling=hot)[0]
        alone = run(engine, own[:1], [8], sampling=hot)[0]
        same = run(engine, [own[0]] * 2, [8, 8], sampling=hot)[0]
    assert one.sequences[1].token_ids == two.sequences[1].token_ids
    assert one.sequences[0].token_ids == alone.sequences[0].token_ids
    assert same.sequences[0].token_ids != same.sequences[1].token_ids


def test_a_batch_that_is_broken_off_leaves_the_engine_usable(checkpoint):
    def interrupt(index, logits_V):
        if index == 3:
            raise KeyboardInterrupt

    with batched(checkpoint) as engine:
        want = run(engine)[1]
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch(prompts(), max_new_tokens=4, on_logits=interrupt)
        got = run(engine)[1]
    assert all(map(torch.equal, want, got))


def test_longer_and_larger_batches_one_after_another(checkpoint):
    """Room that is too small is taken anew; room that suffices is kept."""
    short, long = prompts((5, 4)), prompts((300, 7, 9))
    with batched(checkpoint) as engine:
        first = run(engine, short, [4, 4])[1]
        kept = engine.sequences.together
        run(engine, short, [4, 4])
        assert engine.sequences.together is kept
        run(engine, long, [3, 3, 3])
        assert engine.sequences.together is not kept
        again = run(engine, short, [4, 4])[1]
    for one, other in zip(first, again, strict=True):  # another capacity sums in another order
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_too_many_prompts_none_and_recordings_are_refused(checkpoint):
    with batched(checkpoint, batch=2) as engine:
        with pytest.raises(WorkloadError, match=r"3 prompts at once, and memory .* for 2"):
            engine.generate_batch(prompts((3, 3, 3)))
        with pytest.raises(WorkloadError, match="no prompt"):
            engine.generate_batch([])
        with pytest.raises(WorkloadError, match="the prompt has 600 tokens"):
            engine.generate_batch(prompts((3, 600)))
        engine.record_routes()
        with pytest.raises(WorkloadError, match="a recording is of one sequence"):
            engine.generate_batch(prompts((3, 3)))
        engine.generate(prompts((3,))[0], max_new_tokens=2)
    with tiny_engine(checkpoint) as engine, pytest.raises(WorkloadError, match="planned for 1"):
        engine.generate_batch(prompts((3, 3)))


def test_slots_must_hold_what_a_step_of_all_sequences_needs(checkpoint):
    with pytest.raises(ConfigError, match=r"a decode step of 3 sequences needs 6 experts"):
        batched(checkpoint, "cache.slots=5", batch=3)
    with batched(checkpoint, "cache.slots=8", batch=100) as engine:  # a layer has no more
        assert engine.runtime.plan.num_slots == 8


def test_memory_is_planned_for_all_rows_and_the_one_that_is_prefilled(checkpoint):
    plans = {}
    for batch in (1, 2, 8):
        with batched(checkpoint, batch=batch) as engine:
            plans[batch] = engine.runtime.plan
    one = plans[1].kv_bytes
    assert [plans[n].kv_bytes for n in (2, 8)] == [3 * one, 9 * one]
    cold = "cache=none", "prefill=always_stream", "prefill.groups=8", "prefill.ring=1"
    with batched(checkpoint, *cold, batch=3) as engine:
        assert engine.runtime.plan.staging_rows == 6  # all are declined, and read from there


def test_what_does_not_fit_is_refused_with_the_numbers(checkpoint):
    with pytest.raises(CapacityError, match=r"KV cache of 1000000 .* fewer sequences at once"):
        batched(checkpoint, batch=1_000_000)


def test_a_cache_that_has_no_rows_is_refused_by_name(checkpoint, monkeypatch):
    monkeypatch.setattr(batch_cache, "ROWS", {})
    with pytest.raises(ConfigError, match="qwen3_moe: several prompts at once need a StaticLayer"):
        batched(checkpoint, batch=2)
    with batched(checkpoint, batch=1) as engine:
        engine.generate([3, 4], max_new_tokens=2)
