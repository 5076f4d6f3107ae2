"""The replaced gpt-oss against transformers' own, on the CPU, chunk by chunk, token by token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from residency.runtime.replacements import apply
from residency.runtime.replacements.seam import Seam

SCHEDULES = [  # tokens a pass; the tiny model's window is 8
    [12, *[1] * 10],
    [1] * 20,
    [5, 7, 1, 1, 9, 1],
    [3, 2, 1, 4, 8, 8, 20, 1, 1],
]


class Pair:
    def __init__(self, folder):
        load = AutoModelForCausalLM.from_pretrained
        self.original, self.replaced = (
            load(folder, dtype=torch.float32, experts_implementation="eager") for _ in range(2)
        )
        self.begin = 0
        self.notes = apply(self.replaced, Seam(position_of=lambda: self.begin), on_cpu=True)

    def caches(self, capacity):
        return [StaticCache(config=self.original.config, max_cache_len=capacity) for _ in range(2)]

    def step(self, ids, caches):
        models = self.original, self.replaced
        logits = [m(ids, cache=c).logits for m, c in zip(models, caches, strict=True)]
        self.begin += ids.shape[1]
        return logits


@pytest.fixture(scope="module")
def pair(tiny_checkpoint):
    return Pair(tiny_checkpoint("gpt_oss"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@torch.inference_mode()
def test_equal_to_the_original(pair, schedule, batch):
    torch.manual_seed(0)
    caches = pair.caches(64)
    for _ in range(2):  # the second time on a cache that was used and reset
        pair.begin = 0
        for cache in caches:
            cache.reset()
        for num in schedule:
            original, replaced = pair.step(torch.randint(0, 128, (batch, num)), caches)
            torch.testing.assert_close(replaced, original, rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_equal_where_the_cache_is_shorter_than_the_window(pair):
    caches, pair.begin = pair.caches(6), 0
    for num in (3, 1, 1, 1):
        original, replaced = pair.step(torch.arange(num)[None], caches)
        torch.testing.assert_close(replaced, original, rtol=1e-5, atol=1e-4)


def test_what_was_replaced_is_noted(pair):
    assert any("GptOssAttention x 4" in note for note in pair.notes)


@torch.inference_mode()
def test_a_mask_and_a_cache_that_grows_are_refused(pair):
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        pair.replaced(ids, attention_mask=torch.ones(1, 2), cache=pair.caches(8)[0])
    with pytest.raises(TypeError, match="needs a StaticCache"):
        pair.replaced(ids, cache=DynamicCache(config=pair.replaced.config))
    with pytest.raises(TypeError, match="needs a StaticCache"):
        pair.replaced(ids, use_cache=False)
