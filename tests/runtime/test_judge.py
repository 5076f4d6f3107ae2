"""The outside judge: transformers' own eager model on checkpoints it wrote itself.

Same chunks, same class of cache, one thread, float32: all logits must be equal bit for bit.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import architectures
import pytest
import torch
from conftest import tiny_engine
from transformers import AutoModelForCausalLM, StaticCache

from residency.conf import compose
from residency.runtime.memory import plan_memory

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]  # longer than gpt_oss's tiny window
NUM_NEW = 6
SCHEDULES = {"one chunk": 16, "two chunks": 7}
CHOICES = [  # every layer has 8 experts
    ("cache=lru", "cache.slots=3", "prefill=demand"),
    ("cache=lrfu", "cache.slots=5", "prefill=hit_d2d"),
    ("cache=none", "decode=cpu", "prefill=always_stream"),
]


@dataclass
class Case:
    engine: object
    eager: object
    expected: dict  # by chunk length: (tokens, logits behind each), made on first use

    def judgement(self, chunk_tokens):
        if chunk_tokens not in self.expected:
            self.expected[chunk_tokens] = greedy(self.eager, PROMPT, chunk_tokens)
        return self.expected[chunk_tokens]


def greedy(model, prompt, chunk_tokens):
    """Tokens, and the logits [V] behind the prompt and each of them, of transformers' model."""
    kept = StaticCache(config=model.config, max_cache_len=256)  # what a Sequence takes

    def step(ids):
        return model(ids, cache=kept, use_cache=True, logits_to_keep=1).logits[0, -1]

    with torch.inference_mode():
        for chunk in torch.tensor([prompt]).split(chunk_tokens, dim=1):
            logits = [step(chunk)]
        for _ in range(NUM_NEW - 1):
            logits.append(step(logits[-1].argmax().view(1, 1)))
    return [int(each.argmax()) for each in logits], logits


@cache
def composed(choice):
    return compose(choice).policies


def install(engine, choice):
    """As `Engine.reconfigured` does, without its garbage collection, which would be most of it."""
    policies = deepcopy(composed(choice))
    engine._standing.install(policies, plan_memory(engine.architecture, policies, engine.context))


@pytest.fixture(scope="module", params=architectures.CONFIGS)
def case(request, tiny_checkpoint):
    folder = tiny_checkpoint(request.param)
    eager = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    for weight in eager.parameters():  # a mapped file's are off the boundaries that bits depend on
        weight.data = weight.data.clone()
    with tiny_engine(folder) as engine:
        yield Case(engine, eager.eval(), {})


@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_equal_transformers_eager(case, schedule, choice):
    chunk_tokens = SCHEDULES[schedule]
    tokens, expected = case.judgement(chunk_tokens)
    install(case.engine, (*choice, f"prefill.chunk_tokens={chunk_tokens}"))
    seen = []
    for prompt in (PROMPT[3:], PROMPT):  # the second on a cache that was used and reset
        seen.clear()
        report = case.engine.generate(
            prompt, max_new_tokens=NUM_NEW, ignore_eos=True, on_logits=seen.append
        )
    assert report.token_ids == tokens
    for logits, judged in zip(seen, expected, strict=True):
        assert torch.equal(logits, judged)


def test_experts_are_not_read_into_the_model(case):
    names = [name for name, _ in case.engine.model.named_parameters()]
    assert not [n for n in names if n.endswith(("gate_up_proj", "down_proj"))]


def test_the_comparison_can_fail(case):
    """One other chunk length changes bits somewhere, so equality above is not idle."""
    changed = 0
    for chunk_tokens in (7, 4):
        _, one = greedy(case.eager, PROMPT, chunk_tokens)
        changed += sum(
            not torch.equal(a, b) for a, b in zip(one, case.judgement(16)[1], strict=True)
        )
    assert changed
