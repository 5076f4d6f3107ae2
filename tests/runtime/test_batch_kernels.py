"""The way of a GPU, in Triton's interpreter: fused layers and decode kernels over ragged rows."""

import pytest
import torch
from conftest import write_checkpoint

pytest.importorskip("triton")

from residency.conf import build_engine, compose
from residency.runtime.fused import kernel_shape
from residency.runtime.fused_decode import FusedDecode
from residency.runtime.kernels import attention
from residency.runtime.kernels.attention import AttendConfig
from residency.runtime.loaded import Loaded
from residency.runtime.replacements import apply

PROMPTS, LIMITS = [[9, 3, 77], [5], [60, 2]], [2, 3, 2]


def run(folder):
    model = ["model=folder", f"model.path={folder}", "model.dtype=float32", "model.context=8"]
    config = compose([*model, "device=cpu", "cache.slots=6"])
    with build_engine(config, batch=3) as engine:
        engine.runtime.capturable = False  # there is no graph to capture here
        seen = []
        report = engine.generate_batch(
            PROMPTS, max_new_tokens=LIMITS, on_logits=lambda _, logits_V: seen.append(logits_V)
        )
        decode, sizes = engine.runtime._decode, set(engine.sequences.together.steps)
        return report, torch.stack(seen), decode, sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_batch does this on the GPU")
def test_rows_through_the_kernels_equal_plain_torch(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    want, plain, _, _ = run(folder)

    def shape(self):
        experts = self.model.get_submodule(self.architecture.expert_modules[0])
        return kernel_shape(self.architecture.layout, experts)

    def fuse_layers(self, seam):
        assert apply(self.model, seam, on_cpu=True)
        self.takes_masks = False

    monkeypatch.setattr(Loaded, "_kernel_shape", shape)
    monkeypatch.setattr(Loaded, "fuse_layers", fuse_layers)
    monkeypatch.setattr(attention, "ATTEND_CONFIGS", [AttendConfig(4, 16, 4, 1)])
    got, fused, decode, sizes = run(folder)
    torch.testing.assert_close(fused, plain, rtol=0, atol=2e-5)
    assert got.counters == want.counters
    assert [one.token_ids for one in got.sequences] == [one.token_ids for one in want.sequences]
    assert isinstance(decode, FusedDecode) and sizes == {1, 3}
