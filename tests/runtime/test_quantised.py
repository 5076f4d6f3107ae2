"""Quantised checkpoints, judged by transformers' eager model with the dequantised weights."""

import pytest
import torch
from conftest import tiny_engine
from quantised import STORERS, write_gpt_oss, write_pair
from transformers import AutoModelForCausalLM

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]
KINDS = (*STORERS, "mxfp4")


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(quantised, plain) folders of one model."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_gpt_oss(folder) if request.param == "mxfp4" else write_pair(folder, request.param)


def generated(folder, *choice):
    """(token ids, logits [T, V]) of a short greedy generation."""
    seen = []
    with tiny_engine(folder, *choice, "prefill.chunk_tokens=5") as engine:
        report = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True, on_logits=seen.append)
    return report.token_ids, torch.stack(seen)


@pytest.mark.parametrize(
    "choice", [("cache=lrfu", "cache.slots=3", "prefill=demand"), ("decode=cpu",)], ids=" ".join
)
def test_logits_equal_eager_on_the_dequantised_weights(pair, choice):
    quantised, plain = pair
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, experts_implementation="eager"
    )
    ids, logits = generated(quantised, *choice)
    for n, found in enumerate(logits):
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPT + ids[:n]])).logits[0, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_same_as_the_plain_checkpoint_of_the_dequantised_weights(pair):
    """Bit for bit where an expert is multiplied by the same matrix lying the same way."""
    quantised, plain = pair
    ids, logits = generated(quantised, "cache.slots=3")
    expected_ids, expected = generated(plain, "cache.slots=3")
    assert ids == expected_ids
    if "mxfp4" in str(quantised):  # plain gpt_oss keeps its matrices transposed
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits, expected)


def test_dense_weights_are_dequantised_and_the_plan_says_so(pair):
    quantised, plain = pair
    with tiny_engine(quantised) as engine, tiny_engine(plain) as other:
        weights, expected = (dict(e.model.named_parameters()) for e in (engine, other))
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        attention = [w for n, w in weights.items() if n.endswith("proj.weight")]
        stored_plain = "mxfp4" in str(quantised)
        taken = 0 if stored_plain else sum(w.nbytes for w in attention)
        assert engine.runtime.plan.dequantised_bytes == taken
        assert other.runtime.plan.dequantised_bytes == 0
        assert engine.runtime.plan.weight_bytes == other.runtime.plan.weight_bytes
        assert not engine.notes
