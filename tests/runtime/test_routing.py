"""Made-up and recorded routes: their law, their tables, and how a step looks them up."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_engine

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.popularity import popularity, profile_rates
from residency.runtime.route_tables import REUSE, draw_distinct, even, routes_of, skewed
from residency.runtime.routing import TableRouting, adjacent_reuse
from residency.runtime.traces import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"
GPT_OSS = DATA / "gpt-oss-20b_decode.npz"
GPT_OSS_SPACE = IdSpace(24, 32, 4)
SPACES = [IdSpace(3, 8, 2), IdSpace(2, 128, 8), IdSpace(2, 512, 10), IdSpace(1, 8, 7)]
PROMPT = list(range(3, 20))


def assert_distinct(table, space):
    assert table.shape[1:] == (space.num_layers, space.top_k)
    ascending = table.sort(dim=2).values
    assert (ascending[..., 1:] > ascending[..., :-1]).all()
    assert ascending.min() >= 0 and ascending.max() < space.num_experts


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("build", [even, skewed])
def test_a_token_never_names_an_expert_twice(build, space):
    assert_distinct(build(space, 0).table_NLK, space)


@pytest.mark.parametrize("build", [even, skewed])
def test_the_seed_makes_the_table(build):
    space = IdSpace(2, 16, 3)
    one, again, other = (build(space, seed).table_NLK for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_even_routes_use_every_expert_alike(space):
    table = even(space, 0).table_NLK
    expected = len(table) * space.top_k / space.num_experts
    for layer in range(space.num_layers):
        counts = torch.bincount(table[:, layer].flatten().int(), minlength=space.num_experts)
        assert (counts - expected).abs().max() < 5 * expected**0.5
    assert adjacent_reuse(table) == pytest.approx(space.top_k / space.num_experts, abs=0.01)


def test_the_reuse_aimed_at_is_that_of_the_recorded_trace():
    recorded = read_trace(str(GPT_OSS), GPT_OSS_SPACE)
    assert adjacent_reuse(recorded) == pytest.approx(REUSE, abs=5e-4)


@pytest.mark.parametrize("space", [IdSpace(4, 512, 10), IdSpace(4, 128, 8), GPT_OSS_SPACE], ids=str)
def test_skewed_routes_repeat_as_much_as_recorded_ones(space):
    routes = skewed(space, 0)
    assert adjacent_reuse(routes.table_NLK) == pytest.approx(REUSE, abs=0.01)
    assert "chance" in routes.note and "0.42" in routes.note


def test_skewed_routes_prefer_the_popular():
    """The order of use is the order of the fitted shares, from one table to another seed's."""
    space = IdSpace(1, 64, 4)
    counts = torch.bincount(skewed(space, 0).table_NLK.flatten().int(), minlength=64).double()
    shares = popularity(space, torch.Generator().manual_seed(0))[0]
    assert torch.corrcoef(torch.stack([counts, shares]))[0, 1] > 0.95
    assert counts.max() > 10 * counts.min()


def test_skewed_routes_whose_popularity_repeats_enough_keep_nothing():
    assert "chance 0.000" in skewed(IdSpace(2, 8, 6), 0).note


@pytest.mark.parametrize("top_k", [2, 5])
def test_distinct_draws_follow_the_law_of_draws_one_after_another(top_k):
    """top_k 5 of 8 is drawn by a race, 2 of 8 by rejection; the first two have one law."""
    shares = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.float64) / 36
    drawn = draw_distinct(shares, 100_000, top_k, torch.Generator().manual_seed(0))[:, 0].long()
    first = torch.bincount(drawn[:, 0], minlength=8) / len(drawn)
    assert torch.allclose(first.double(), shares[0], atol=0.01)
    pair = (drawn[:, 0] == 7) & (drawn[:, 1] == 6)
    assert pair.double().mean() == pytest.approx(8 / 36 * 7 / 28, abs=0.005)


def test_the_profile_becomes_finite_rates_for_any_shape():
    rates = profile_rates()
    assert rates.shape == (48, 512) and rates.isfinite().all() and (rates > 0).all()
    for space in SPACES:
        shares = popularity(space, torch.Generator().manual_seed(0))
        assert shares.shape == (space.num_layers, space.num_experts)
        assert torch.allclose(shares.sum(dim=1), torch.ones((), dtype=torch.float64))


def routed(table, token, num_tokens, layer=1):
    step = Step(torch.tensor(token), layer, Phase.PREFILL)
    return TableRouting(table).routes(step, torch.zeros(num_tokens, table.shape[2]).long())


def test_a_step_takes_the_rows_of_its_tokens_and_wraps_around():
    table = torch.arange(5 * 2 * 3, dtype=torch.int16).view(5, 2, 3)
    for token, num_tokens, rows in [(4, 1, [4]), (3, 3, [1, 2, 3]), (6, 3, [4, 0, 1])]:
        found = routed(table, token, num_tokens)
        assert found.dtype == torch.int64
        assert torch.equal(found, table[rows, 1].long())
    assert torch.equal(routed(table, 11, 12)[:2], table[[0, 1], 1].long())
    assert torch.equal(routed(table, 1, 4), table[[3, 4, 0, 1], 1].long())


def counts_of(engine):
    report = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
    return [(row.layer, row.phase, row.lookups, row.hits) for row in report.counters]


@pytest.mark.parametrize("name", ["even", "skewed"])
def test_an_engine_is_routed_the_same_after_forgetting(checkpoint, name):
    with tiny_engine(checkpoint, f"model.routing={name}", "cache.slots=8") as engine:
        first = counts_of(engine)
        assert counts_of(engine) != first
        engine.runtime.forget()
        assert counts_of(engine) == first
        assert any(f"routing: {name}" in note for note in engine.notes)


def test_routes_do_not_depend_on_the_chunks(checkpoint):
    """Each token keeps its row, so decode steps see the same experts however prefill was cut."""
    seen = []
    for chunk in (4, 64):
        cut = f"prefill.chunk_tokens={chunk}"
        with tiny_engine(checkpoint, "model.routing=even", cut, "cache.slots=all") as engine:
            logits = []
            engine.generate(PROMPT, max_new_tokens=3, on_logits=logits.append, ignore_eos=True)
            seen.append(torch.stack(logits))
    assert torch.allclose(*seen, atol=1e-4)


def test_sequences_that_are_decoded_together_have_routes_of_their_own():
    """Each goes on in the table a token a step, and they start far apart."""
    table_NLK = torch.arange(1 << 14)[:, None, None].expand(-1, 2, 3)
    routing = TableRouting(table_NLK)
    ids_TK = torch.zeros(8, 3, dtype=torch.int64)
    steps = []
    for token in range(40, 60):
        for layer in range(2):
            step = Step(torch.tensor(token), layer, Phase.DECODE)
            steps.append(routing.routes(step, ids_TK)[:, 0])
            assert torch.equal(routing.routes(step, ids_TK[:3])[:, 0], steps[-1][:3])
    rows = torch.stack(steps[::2], dim=1)
    assert torch.equal(torch.stack(steps[1::2], dim=1), rows)
    assert rows[0].tolist() == list(range(40, 60))  # the first as if it were alone
    assert bool((rows.diff(dim=1).remainder(1 << 14) == 1).all())
    assert len(rows.unique()) == rows.numel()


def trace(folder, name="trace.npz", **arrays):
    np.savez(folder / name, **arrays)
    return folder / name


def ids(num_experts=8, shape=(5, 3, 2)):
    table = np.zeros(shape, dtype=np.uint8)
    table[..., 1] = num_experts - 1
    table[..., 2:] = 1
    return table


def refused(file, space=SPACES[0]):
    with pytest.raises(ConfigError) as error:
        routes_of(f"trace:{file}", space, 0)
    text = str(error.value)
    assert text.startswith(f"model.routing=trace:{file}: ") and "\n" not in text
    return text


def test_a_fitting_trace_is_taken(tmp_path):
    routes = routes_of(f"trace:{trace(tmp_path, expert_ids=ids())}", SPACES[0], 0)
    assert torch.equal(routes.table_NLK, torch.from_numpy(ids()).short())
    stated = trace(tmp_path, expert_ids=ids(4), num_experts=8)
    assert routes_of(f"trace:{stated}", SPACES[0], 0) is not None


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"expert_ids": ids(shape=(5, 4, 2))}, "4 layers x 8 experts, top-2"),
        ({"expert_ids": ids(7)}, "3 layers x 7 experts"),
        ({"expert_ids": ids(16)}, "3 layers x 16 experts"),
        ({"expert_ids": ids(), "num_experts": 9}, "3 layers x 9 experts"),
        ({"expert_ids": ids(), "num_experts": 4}, "of 4"),
        ({"expert_ids": ids(shape=(5, 3, 3))}, "top-3"),
        ({"expert_ids": ids()[0]}, "3-D"),
        ({"expert_ids": ids()[:0]}, "3-D"),
        ({"expert_ids": ids().astype(float)}, "float64"),
        ({"expert_ids": ids() * 0 + 7}, "twice"),
        ({"other": ids()}, "expert_ids"),
    ],
)
def test_a_trace_of_another_shape_is_refused(tmp_path, arrays, word):
    assert word in refused(trace(tmp_path, **arrays))


def test_a_missing_or_broken_trace_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "none.npz")
    whole = trace(tmp_path, expert_ids=ids()).read_bytes()
    for name, content in {"cut": whole[:100], "text": b"routes", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)


def test_an_unknown_name_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="model, even, skewed or trace:FILE"):
        tiny_engine(checkpoint, "model.routing=random")
    with pytest.raises(ConfigError, match="24 layers x 32 experts"):
        tiny_engine(checkpoint, f"model.routing=trace:{GPT_OSS}")
