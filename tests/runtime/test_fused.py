"""The kernels behind the runtime's interfaces equal the plain definitions they stand for."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.policies.cache.lru import Lru
from residency.policies.cache.none import NoCache
from residency.policies.cache.s3fifo import S3Fifo
from residency.policies.decode.cpu import Cpu
from residency.policies.decode.gpu import Gpu
from residency.policies.decode.hybrid import Hybrid
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.admission import copy_list
from residency.runtime.banks import Banks
from residency.runtime.counters import Counters
from residency.runtime.experts import Call, ExpertMath
from residency.runtime.formats import Plain
from residency.runtime.fused import FusedMaths, kernel_shape
from residency.runtime.fused_decode import FusedDecode
from residency.runtime.host_nodes import HostNodes
from residency.runtime.kernels import gather
from residency.runtime.layout import RowLayout
from residency.runtime.quotas import QuotaTable
from residency.runtime.slots import SlotPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPACE = IdSpace(num_layers=2, num_experts=8, top_k=2)
HIDDEN, WIDTH = 64, 32


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path_factory.mktemp("fused"), "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.model.layers[0].mlp.experts


@pytest.fixture(scope="module")
def banks():
    torch.manual_seed(1)
    shapes = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    banks = Banks(SPACE, RowLayout.of(shapes, Plain(torch.float32), torch.float32))
    for layer in range(SPACE.num_layers):
        for view in banks.weights(layer).values():
            view.normal_(0, 0.3)
    if DEVICE.type == "cuda":
        banks.layers = [rows.pin_memory() for rows in banks.layers]
    return banks


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one by one; a thousand that find nothing to copy take long."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gather, "ON_DEVICE", gather.GatherConfig(4, 8192, 4))


def random_call(module, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.rand(num_tokens, SPACE.num_experts, generator=generator)
    weights_TK, ids_TK = scores.topk(SPACE.top_k)
    return Call(module, x_TH.to(DEVICE), ids_TK.to(DEVICE), weights_TK.to(DEVICE))


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_fused_maths_equal_plain_maths_in_any_grouping(module, banks, num_tokens):
    shape = kernel_shape(banks.layout, module)
    rows = banks.layers[0].to(DEVICE)
    call = random_call(module, num_tokens, seed=num_tokens)
    plain = ExpertMath(banks.layout, rows)
    work = plain.begin(call)
    plain.run(work, list(range(8)), list(range(8)))
    results = []
    for groups in ([range(8)], [range(5, 8), range(5)], [[e] for e in range(8)]):
        fused = FusedMaths(shape, rows, SPACE.num_experts)
        parts = fused.begin(call)
        for group in groups:
            fused.run(parts, list(group), list(group))
        results.append(parts.combined())
    torch.testing.assert_close(results[0], work.combined(), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("lengths", [[5, 1, 5, 8], [33, 16, 20]])
def test_residents_computed_at_once_change_no_bit(module, banks, lengths):
    shape = kernel_shape(banks.layout, module)
    rows = banks.layers[0].to(DEVICE)
    fused = FusedMaths(shape, rows, SPACE.num_experts)
    moved = torch.tensor([-1, 2, -1, 3, 1, -1, 7, 6], dtype=torch.int32)  # the rows of experts
    rows = rows[[0, 4, 1, 3, 0, 0, 7, 6]].contiguous()
    shuffled = FusedMaths(shape, torch.cat([rows, banks.layers[0].to(DEVICE)]), SPACE.num_experts)
    absent = moved.lt(0).nonzero().flatten().tolist()
    for seed, num_tokens in enumerate(lengths):
        call = random_call(module, num_tokens, seed)
        want = fused.begin(call)
        fused.run(want, list(range(8)), list(range(8)))
        got = shuffled.begin(call, moved)
        shuffled.run(got, absent, [8 + expert for expert in absent])
        assert torch.equal(got.combined(), want.combined())


@pytest.mark.parametrize(
    ("policy", "num_slots", "num_sequences"),
    [
        *((Lru(Lru.Config()), 5, 1), (NoCache(NoCache.Config()), 0, 1)),
        (Lru(Lru.Config()), 7, 3),
        pytest.param(NoCache(NoCache.Config()), 0, 3, marks=pytest.mark.gpu),
        (S3Fifo(S3Fifo.Config(slots=6, scope="per_layer")), 6, 1),
    ],
)
def test_a_decode_step_equals_plain_maths_and_counts_alike(
    module, banks, policy, num_slots, num_sequences
):
    shape = kernel_shape(banks.layout, module)
    row_bytes = banks.layout.row_bytes
    num_rows = num_slots + num_sequences * SPACE.top_k
    rows = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=DEVICE)
    pool = SlotPool(SPACE, num_slots, policy, DEVICE)
    counters = Counters(SPACE.num_layers, row_bytes, DEVICE)
    quotas = QuotaTable(Gpu(Gpu.Config()), SPACE, DEVICE)
    decode = FusedDecode(shape, pool, banks, rows, counters, quotas)
    oracle = SlotPool(SPACE, num_slots, type(policy)(policy.config), torch.device("cpu"))
    expected = torch.zeros(SPACE.num_layers, 5, dtype=torch.int64)
    num_tokens = 3 if num_sequences == 1 else 2
    for token, layer in itertools.product(range(num_tokens), range(SPACE.num_layers)):
        call = random_call(module, num_sequences, seed=token * 2 + layer)
        step = Step(torch.tensor(token, device=DEVICE), layer, Phase.DECODE)
        plain = ExpertMath(banks.layout, banks.layers[layer].to(DEVICE))
        work = plain.begin(call)
        plain.run(work, list(range(8)), list(range(8)))
        torch.testing.assert_close(decode.layer(step, call), work.combined(), rtol=1e-4, atol=1e-4)
        cpu_step = Step(torch.tensor(token), layer, Phase.DECODE)
        admission = oracle.admit(call.ids_TK.cpu().flatten(), cpu_step)
        oracle.touch(admission.unique, cpu_step)
        expected[layer] += admission.counts
        assert torch.equal(pool.slot_of.cpu(), oracle.slot_of)
        assert torch.equal(pool.policy.keys.cpu()[:-1], oracle.policy.keys[:-1])
    for row in counters.rows():
        if row.phase == "decode":
            counts = [row.lookups, row.hits, row.misses, row.evictions, row.computed]
            assert counts == expected[row.layer].tolist()
            assert row.bytes["fetch"] == row.misses * row_bytes


@given(ids=st.lists(st.integers(0, 7), min_size=1, max_size=6), slots=st.integers(6, 12))
@settings(deadline=None, max_examples=40)
def test_the_copy_list_names_each_fetched_expert_once(ids, slots):
    pool = SlotPool(SPACE, slots, Lru(Lru.Config()), torch.device("cpu"))
    step = Step(torch.tensor(1), 1, Phase.DECODE)
    admission = pool.admit(torch.tensor(ids), step)
    copies = copy_list(admission, 1, SPACE)
    count = int(copies.number)
    assert sorted(copies.experts[:count].tolist()) == sorted(set(ids))
    rows = copies.rows[:count].tolist()
    assert [pool.id_of[row] - 8 for row in rows] == copies.experts[:count].tolist()


class TorchHost:
    """Experts of the banks computed in plain torch, as jobs."""

    def __init__(self, banks, module):
        self.maths = [ExpertMath(banks.layout, rows) for rows in banks.layers]
        self.module = module

    def job(self, layer, num_tokens, *, pin=False):
        shapes = {
            "x_TH": ((num_tokens, HIDDEN), torch.float32),
            "ids_TK": ((num_tokens, SPACE.top_k), torch.int32),
            "weights_TK": ((num_tokens, SPACE.top_k), torch.float32),
            "chosen_E": ((SPACE.num_experts,), torch.uint8),
            "y_TH": ((num_tokens, HIDDEN), torch.float32),
        }
        tensors = {k: torch.full(s, 77, dtype=d, pin_memory=pin) for k, (s, d) in shapes.items()}
        return SimpleNamespace(layer=layer, **tensors)

    def run(self, job):
        call = Call(self.module, job.x_TH, job.ids_TK.long(), job.weights_TK)
        work = self.maths[job.layer].begin(call)
        chosen = job.chosen_E.nonzero().flatten().tolist()
        self.maths[job.layer].run(work, chosen, chosen)
        job.y_TH.copy_(work.combined())


TARGETS = {
    "cpu": (Cpu(Cpu.Config()), NoCache(NoCache.Config()), 0),
    "hybrid": (Hybrid(Hybrid.Config()), Lru(Lru.Config()), 5),
    "hybrid without slots": (Hybrid(Hybrid.Config()), NoCache(NoCache.Config()), 0),
    "one layer on the host": (Gpu(Gpu.Config(cpu_layers=[1])), Lru(Lru.Config()), 5),
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there a host node needs a native function")
@pytest.mark.parametrize(("name", "num_tokens"), [*((name, 1) for name in TARGETS), ("hybrid", 2)])
def test_what_the_quota_leaves_is_computed_on_the_host(module, banks, name, num_tokens):
    target, policy, num_slots = TARGETS[name]
    row_bytes = banks.layout.row_bytes
    rows = torch.zeros(num_slots + 4, row_bytes, dtype=torch.uint8, device=DEVICE)
    pool = SlotPool(SPACE, num_slots, type(policy)(policy.config), DEVICE)
    counters = Counters(SPACE.num_layers, row_bytes, DEVICE)
    quotas = QuotaTable(target, SPACE, DEVICE)
    if target.splits:
        quotas.table_LM[:] = quotas.table_LM // 2
    nodes = HostNodes(TorchHost(banks, module), DEVICE)
    decode = FusedDecode(
        kernel_shape(banks.layout, module), pool, banks, rows, counters, quotas, nodes
    )
    for token, layer in itertools.product(range(3), range(SPACE.num_layers)):
        call = random_call(module, num_tokens, seed=token * 2 + layer)
        plain = ExpertMath(banks.layout, banks.layers[layer].to(DEVICE))
        work = plain.begin(call)
        plain.run(work, list(range(8)), list(range(8)))
        step = Step(torch.tensor(token, device=DEVICE), layer, Phase.DECODE)
        decode.prepare()
        torch.testing.assert_close(decode.layer(step, call), work.combined(), rtol=1e-4, atol=1e-4)
    decode.finish()
    pool.check()
    decoded = [row for row in counters.rows() if row.phase == "decode"]
    for row in decoded:
        assert row.hits + row.fetched + row.computed == row.lookups
        on_host = row.layer in target.host_layers(SPACE.num_layers)
        assert (row.fetched == 0) is on_host
        assert (row.computed > 0) is (on_host or target.splits)
        assert row.bytes["fetch"] == row.fetched * row_bytes
        assert (row.bytes["activations"] > 0) is (row.computed > 0)
