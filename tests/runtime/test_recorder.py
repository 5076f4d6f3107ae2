"""Recorded routes: what the model did, in a file that a run can follow."""

import numpy as np
import pytest
import torch
from conftest import tiny_engine

PROMPT = list(range(3, 20))


def record(engine, file, num_new=5):
    engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True)  # so that the clock has moved
    recorder = engine.record_routes()
    seen = []
    engine.generate(PROMPT, max_new_tokens=num_new, ignore_eos=True, on_logits=seen.append)
    recorder.save(file)
    return torch.stack(seen)


def test_a_file_holds_every_token_that_went_through_the_model(checkpoint, tmp_path):
    file = tmp_path / "routes.npz"
    with tiny_engine(checkpoint, "prefill.chunk_tokens=5") as engine:
        record(engine, file)
    with np.load(file) as arrays:
        assert arrays["expert_ids"].shape == (len(PROMPT) + 4, 3, 2)
        assert arrays["expert_ids"].dtype == np.uint8
        assert arrays["decode"].tolist() == [False] * len(PROMPT) + [True] * 4
        assert int(arrays["num_experts"]) == 8


@pytest.mark.parametrize("name", ["routes.npz", "routes.safetensors"])
def test_following_a_recording_repeats_the_run_bit_for_bit(checkpoint, tmp_path, name):
    """A new engine's first token takes the recording's first row."""
    file = tmp_path / name
    runs = {}
    for name, routing in (("recorded", "model"), ("followed", f"trace:{file}"), ("even", "even")):
        with tiny_engine(checkpoint, f"model.routing={routing}") as engine:
            recorder, seen = engine.record_routes(), []
            engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True, on_logits=seen.append)
            if name == "recorded":
                recorder.save(file)
            runs[name] = torch.stack(seen)
    assert torch.equal(runs["followed"], runs["recorded"])
    assert not torch.equal(runs["even"], runs["recorded"])
