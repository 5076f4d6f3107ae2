"""Sequences decoded together on a GPU, in captured steps: each as if it were alone."""

import itertools

import pytest
import torch
from conftest import write_checkpoint

from residency.conf import build_engine, compose
from residency.policies.step import Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LENGTHS = (3, 40, 17, 1, 9, 64, 23, 5)
LIMITS = [6, 3, 1, 8, 20, 2, 12, 4]
SIZES = dict(hidden_size=128, head_dim=64, moe_intermediate_size=64)  # as the kernels want them
CACHES = ("cache=lru", "cache=lrfu")
MODES = ("prefill=always_stream", "prefill=hit_d2d", "prefill=demand")
COLD = ("cache=none", "prefill=always_stream", "prefill.groups=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("gpu"), "qwen3_moe", num_experts=16, **SIZES)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def make(request, folder):
    base = ["model=folder", f"model.path={folder}", f"model.dtype={request.param}", "device=cuda"]
    return lambda *overrides, batch=8: build_engine(compose([*base, *overrides]), batch=batch)


def prompts(lengths=LENGTHS):
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(2, 128, (n,), generator=rng).tolist() for n in lengths]


def run(engine, texts=None, limits=LIMITS):
    """The report, and each sequence's logits [tokens, V]."""
    texts = prompts() if texts is None else texts
    seen = [[] for _ in texts]
    report = engine.generate_batch(
        texts,
        max_new_tokens=limits,
        ignore_eos=True,
        on_logits=lambda index, logits_V: seen[index].append(logits_V),
    )
    return report, [torch.stack(own) for own in seen]


def captured(engine):
    """Numbers of rows whose decode step was captured."""
    return {n for n, step in engine.sequences.together.steps.items() if step.graph is not None}


@pytest.fixture(scope="module")
def resident(make):
    with make("cache=lru", "cache.slots=all", "prefill=demand") as engine:
        run(engine)
        return torch.cat(run(engine)[1])


@pytest.mark.parametrize(
    "choice",
    [*itertools.product(CACHES, MODES, ("cache.slots=16", "cache.slots=all")), COLD],
    ids=" ".join,
)
def test_captured_steps_give_the_same_bits_under_all_policies(make, resident, choice):
    with make(*choice) as engine:
        run(engine)
        assert torch.equal(torch.cat(run(engine)[1]), resident)
        assert captured(engine) == set(range(1, 8))  # one sequence is done with prefill


def test_captured_steps_equal_eager_ones(make, resident):
    with make("cache.slots=16") as engine:
        engine.runtime.capturable = False
        assert torch.equal(torch.cat(run(engine)[1]), resident)
        assert not captured(engine)


@pytest.mark.parametrize("kernels", ["true", "false"])
def test_each_sequence_is_as_if_alone(make, kernels):
    """Prefill bit for bit; decode within rounding, in float32: in bfloat16 routes may differ."""
    with make("cache.slots=16", f"device.kernels={kernels}") as engine:
        run(engine)
        report, logits = run(engine)
        for text, limit, one, own in zip(prompts(), LIMITS, report.sequences, logits, strict=True):
            alone = run(engine, [text], [limit])
            assert torch.equal(alone[1][0][0], own[0])
            if engine.architecture.dtype == torch.float32:
                assert alone[0].sequences[0].token_ids == one.token_ids
                torch.testing.assert_close(alone[1][0], own, rtol=0, atol=1e-3)


def test_layers_that_are_transformers_own_are_captured_too(tmp_path):
    """They tell rows apart by masks; sequences alone are decoded without."""
    sizes = dict(num_experts=16, hidden_size=128, intermediate_size=64)
    folder = write_checkpoint(tmp_path / "olmoe", "olmoe", **sizes)
    model = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cuda"]
    with build_engine(compose([*model, "cache.slots=16"]), batch=8) as engine:
        first = run(engine)[1]
        again = run(engine)[1]
        assert engine._loaded.takes_masks and captured(engine) == set(range(1, 8))
        assert all(map(torch.equal, first, again))
        for text, limit, own in zip(prompts(), LIMITS, again, strict=True):
            alone = run(engine, [text], [limit])[1][0]
            torch.testing.assert_close(alone, own, rtol=0, atol=1e-3)


def test_single_sequences_between_batches_keep_their_graphs(make):
    with make("cache.slots=16") as engine:
        before = [run(engine)[1], run(engine, prompts()[1:2], [9])[1]]
        for _ in range(2):
            after = [run(engine)[1], run(engine, prompts()[1:2], [9])[1]]
            for one, other in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
                assert torch.equal(one, other)
        assert engine.sequence._graph is not None and captured(engine)


def test_experts_computed_on_the_host_are_close(make):
    with make("cache.slots=16") as engine:
        want = torch.cat(run(engine)[1])
    with make("decode=cpu") as engine:
        got = torch.cat(run(engine)[1])
        if engine.architecture.dtype == torch.float32:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("lengths", [LENGTHS, (2,) * 70], ids=len)
def test_counts_in_the_graph_equal_the_plain_runs(make, lengths):
    """Also where a step has more (token, choice) pairs than the admission kernel takes."""
    reports = []
    for kernels in ("true", "false"):
        routed = ("cache.slots=16", "model.routing=even", f"device.kernels={kernels}")
        with make(*routed, batch=len(lengths)) as engine:
            run(engine, prompts(lengths), 6)
            reports.append(run(engine, prompts(lengths), 6)[0])
    assert reports[0].counters == reports[1].counters
    totals = reports[0].phases[list(Phase).index(Phase.DECODE)]
    assert totals.evictions and totals.bytes["fetch"]
