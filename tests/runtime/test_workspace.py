"""The plan's workspace: an upper bound of what steps take, and not far above it."""

import architectures
import pytest
import torch
from conftest import tiny_engine
from workspace_peak import measured

TOKENS, CONTEXT = 64, 512
SLACK = 1.75  # CPUs differ in what their libraries pack, of short numbers most


CASES = [
    *((model_type, "float32") for model_type in architectures.CONFIGS),
    *((model_type, "bfloat16") for model_type in ("qwen3_moe", "gpt_oss", "deepseek_v2")),
]


@pytest.mark.parametrize(("model_type", "dtype"), CASES)
def test_a_chunk_takes_no_more_than_was_planned_and_not_much_less(
    tiny_checkpoint, model_type, dtype
):
    sizes = (f"model.context={CONTEXT}", f"prefill.chunk_tokens={TOKENS}")
    keys = (*sizes, "cache.slots=50%", f"model.dtype={dtype}")
    with tiny_engine(tiny_checkpoint(model_type), *keys) as engine:
        chunk_bytes, step_bytes = measured(engine, TOKENS, CONTEXT)
        planned = engine.runtime.plan.workspace_bytes
        assert chunk_bytes <= planned <= SLACK * chunk_bytes
        assert step_bytes <= engine.architecture.workspace.num_bytes(1, CONTEXT)


@pytest.mark.parametrize(
    ("changes", "tokens", "context"),
    [
        (dict(num_experts_per_tok=8), 256, 256),  # experts' results
        (dict(moe_intermediate_size=512), 256, 256),  # one expert's products
        (dict(intermediate_size=2048), 64, 256),  # a dense layer
        (dict(num_attention_heads=16, num_key_value_heads=2), 16, 512),  # keys of all heads
    ],
    ids=str,
)
def test_each_part_can_be_the_largest(tmp_path, changes, tokens, context):
    folder = architectures.write(tmp_path / "model", "qwen3_moe", **changes)
    keys = (f"model.context={context}", f"prefill.chunk_tokens={tokens}", "cache.slots=all")
    with tiny_engine(folder, *keys) as engine:
        chunk_bytes, _ = measured(engine, tokens, context)
        assert chunk_bytes <= engine.runtime.plan.workspace_bytes <= SLACK * chunk_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("model_type", architectures.CONFIGS)
def test_on_a_gpu_a_chunk_takes_no_more_than_was_planned(tiny_checkpoint, model_type):
    """Libraries' own workspaces were taken by the first generation."""
    from residency.conf import build_engine, compose

    keys = (f"model.context={CONTEXT}", f"prefill.chunk_tokens={TOKENS}", "device=cuda")
    model = ("model=folder", f"model.path={tiny_checkpoint(model_type)}", "model.dtype=float32")
    with build_engine(compose([*model, *keys])) as engine:
        prompt = [(7 * i) % 120 + 3 for i in range(CONTEXT - 2)]
        engine.generate(prompt, max_new_tokens=2, ignore_eos=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.generate(prompt, max_new_tokens=1, ignore_eos=True)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= engine.runtime.plan.workspace_bytes
