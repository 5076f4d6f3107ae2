"""The outside judge: transformers' own eager model on checkpoints it wrote itself."""

import pytest
import torch
from conftest import ARCHITECTURES, tiny_engine
from transformers import AutoModelForCausalLM

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def judged(request, checkpoints):
    """(folder, {sequence length: eager logits behind its last token})."""
    folder = checkpoints[request.param]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )

    def eager(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1]

    return folder, eager


@pytest.mark.parametrize(
    "choice",
    [
        ("cache=lru", "cache.slots=3", "prefill=always_stream"),
        ("cache=lrfu", "cache.slots=3", "prefill=demand"),
        ("cache=lrfu", "cache.slots=all", "prefill=hit_d2d"),
        ("decode=cpu",),
    ],
    ids=" ".join,
)
def test_logits_equal_transformers_eager(judged, choice):
    folder, eager = judged
    seen = []
    with tiny_engine(folder, *choice, "prefill.chunk_tokens=5") as engine:
        report = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True, on_logits=seen.append)
    for n, logits in enumerate(seen):
        expected = eager(PROMPT + report.token_ids[:n])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_experts_are_not_read_into_the_model(judged):
    folder, _ = judged
    with tiny_engine(folder) as engine:
        names = [name for name, _ in engine.model.named_parameters()]
        assert not [n for n in names if n.endswith(("gate_up_proj", "down_proj"))]
