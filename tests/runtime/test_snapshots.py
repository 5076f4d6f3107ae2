"""Going back under a captured decode step, by the emulated graph: no tensor changes its place."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from residency.runtime.cache_sizes import can_cut
from residency.runtime.replacements import gpt_oss
from residency.runtime.replacements.seam import Seam
from residency.runtime.snapshots import Snapshot, cut_back
from residency.testing.graphs import Capture

FIRST, SECOND, BRANCH = [5, 9, 77, 31, 2, 64, 8], [100, 3, 17], [41, 66, 90, 12]
CAPACITY = 48
CUT, KEPT = ("qwen3_moe", "deepseek_v3", "minimax_m2"), ("qwen3_next", "gpt_oss")


class Line:
    """One model over one static cache, with what a `Sequence` shows of itself."""

    def __init__(self, folder, model_type):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="batched_mm"
        )
        self.model.eval().requires_grad_(False)
        self.runtime = SimpleNamespace(position=0)
        if model_type == "gpt_oss":
            assert gpt_oss.replace(self.model, Seam(position_of=lambda: self.runtime.position))
        self.cache = StaticCache(config=self.model.config, max_cache_len=CAPACITY)
        self.held = 0

    @property
    def can_cut(self):
        return all(can_cut(layer) for layer in self.cache.layers)

    @torch.inference_mode()
    def step(self, ids):
        out = self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        self.runtime.position += ids.shape[1]
        self.held = self.runtime.position
        return out

    def prefill(self, ids):
        return self.step(torch.tensor([ids]))


class Captured:
    """A line's decode step: captured once, replayed afterwards."""

    def __init__(self, line, token):
        self.line, self.ids = line, torch.tensor([[token]])
        with torch.inference_mode(), Capture() as self.graph:
            self.out = line.step(self.ids)

    @torch.inference_mode()
    def __call__(self, token):
        self.ids.fill_(token)
        self.graph.replay()
        self.line.runtime.position += 1
        self.line.held = self.line.runtime.position
        return self.out.clone()


@pytest.mark.parametrize("model_type", CUT + KEPT)
def test_replays_go_on_where_the_cache_went_back_to(tiny_checkpoint, model_type):
    folder = tiny_checkpoint(model_type)
    line = Line(folder, model_type)
    line.prefill(FIRST)
    line.prefill([7])
    snapshot = Snapshot(line)
    decode = Captured(line, 8)
    line.prefill(SECOND)
    [decode(token) for token in (9, 10, 11)]
    if model_type in CUT:
        assert line.can_cut and snapshot.num_bytes == 0
        cut_back(line, len(FIRST) + 1)
    else:
        assert not line.can_cut and snapshot.num_bytes > 0
    if model_type not in CUT or model_type == CUT[-1]:  # a snapshot cuts what can be cut
        snapshot.put_back(line)
    assert line.held == line.runtime.position == len(FIRST) + 1
    went_on = [line.prefill(BRANCH), *(decode(token) for token in (30, 31, 32))]

    fresh = Line(folder, model_type)
    fresh.prefill(FIRST)
    fresh.prefill([7])
    again = [fresh.prefill(BRANCH), *(fresh.prefill([token]) for token in (30, 31, 32))]
    for mine, theirs in zip(went_on, again, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(went_on[0], line.prefill(BRANCH))  # elsewhere: it can fail
