"""Qwen4 on a GPU: replaced against transformers' own, captured against eager, tables by kernel."""

import copy

import pytest
import torch
from conftest import write_checkpoint
from qwen4 import SIZES
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from residency.conf import build_engine, compose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
# As the experts' kernels want them.
WIDE = {**SIZES, "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 16}
PROMPT = [3 + n % 50 for n in range(45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("gpu") / "model", "qwen4_exp_text", **WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replaced_equals_transformers(folder, dtype):
    """Also with token by token far above the indexer's budget."""
    from residency.runtime.replacements import Seam, apply

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
    for name, parameter in theirs.named_parameters():
        if "mlp.gate.weight" in name:  # far from ties, so that rounding changes no route
            torch.nn.init.normal_(parameter, std=1.0)
    ours = copy.deepcopy(theirs)
    cache, other = StaticCache(ours.config, 64), DynamicCache(config=theirs.config)
    position = 0
    assert apply(ours, Seam(lambda: position))
    errors = []
    for ids in torch.tensor([PROMPT], device="cuda").split([31, 1, 1, 9, 1, 1, 1], 1):
        with torch.inference_mode():
            got = ours(ids, cache=cache, use_cache=True).logits.double()
            want = theirs(ids, cache=other, use_cache=True).logits.double()
        position += ids.shape[1]
        errors += ((got - want).norm(dim=-1) / want.norm(dim=-1)).flatten().tolist()
    # In bfloat16 some tokens select other keys or experts, and later ones look back at them:
    # rounding decides among near ones. (The model is tiny and random.)
    share, limit = (0.8, 1e-3) if dtype == torch.float32 else (0.25, 5e-2)
    assert sorted(errors)[int(share * len(errors))] < limit, errors


def logits(engine, num_new=8):
    seen = []
    for prompt in (PROMPT, PROMPT[5:20]):
        engine.generate(prompt, max_new_tokens=num_new, ignore_eos=True, on_logits=seen.append)
    return torch.stack(seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_equals_an_eager_one(folder, dtype):
    base = ["model=folder", f"model.path={folder}", f"model.dtype={dtype}", "device=cuda"]
    with build_engine(compose([*base, "cache.slots=20"])) as engine:
        assert engine.runtime.capturable and not engine.runtime.plan.mapped_tables
        assert any("Qwen4ExpTextDecoderLayer" in note for note in engine.notes)
        captured = logits(engine)
        assert engine.sequence._graph is not None
    with build_engine(compose([*base, "cache.slots=20"])) as engine:
        engine.runtime.capturable = False
        assert torch.equal(logits(engine), captured)


def test_mapped_tables_run_without_a_graph(folder, monkeypatch):
    base = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cuda"]
    with build_engine(compose(base)) as engine:
        pinned = logits(engine)
    from dataclasses import replace

    from residency.runtime.memory import MemoryPlan

    monkeypatch.setattr(
        MemoryPlan, "with_checkpoint_tables", lambda plan, device: replace(plan, mapped_tables=True)
    )
    with build_engine(compose(base)) as engine:
        assert not engine.runtime.capturable
        assert any("host tables are not pinned" in note for note in engine.notes)
        assert torch.equal(logits(engine), pinned)


def test_a_table_s_rows_by_kernel(folder):
    base = ["model=folder", f"model.path={folder}", "device=cuda"]
    with build_engine(compose(base)) as engine:
        table = engine.model.get_submodule(TABLE)
        ids = torch.randint(0, table.shape.num_ids, (7, 4))
        assert torch.equal(table(ids.cuda()).cpu(), table(ids))


def test_four_layers_of_the_real_shape():
    """Prefill of 512 and 16 captured steps; needs 20 GiB of host memory for the banks."""
    overrides = ["workload=bench", "model=qwen4_exp", "model.layers=4", "model.context=8192"]
    few = ["device=cuda", "prefill=always_stream", "cache.slots=256", "model.table_rows=1000000"]
    with build_engine(compose([*overrides, *few])) as engine:
        seen = []
        prompt = [5 + n % 1000 for n in range(512)]
        for _ in range(2):
            report = engine.generate(
                prompt, max_new_tokens=17, ignore_eos=True, on_logits=seen.append
            )
        assert engine.sequence._graph is not None
        assert all(part.isfinite().all() for part in seen)
        assert len(report.token_ids) == 17
        assert report.phases[1].bytes["table"] == 16 * 16 * 320
        # Above the indexer's budget of 2,048 tokens: blocks are selected, in chunks and steps.
        long = engine.generate(prompt * 5, max_new_tokens=9, ignore_eos=True, on_logits=seen.append)
        assert len(long.token_ids) == 9 and all(part.isfinite().all() for part in seen)
