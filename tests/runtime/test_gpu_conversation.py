"""Conversations on a GPU: captured decode steps go on behind cuts and snapshots, bit for bit."""

import pytest
import torch
from conftest import write_checkpoint
from qwen4 import SIZES as QWEN4

from residency.conf import build_engine, compose
from residency.runtime.conversation import Conversation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZES = {  # as the kernels want them
    "qwen3_moe": dict(hidden_size=128, head_dim=64, moe_intermediate_size=64),
    "qwen4_exp_text": {**QWEN4, "hidden_size": 128, "moe_intermediate_size": 64},
}
MESSAGES = ([5, 9, 27, 31, 2, 14, 8] * 3, [10, 3, 17, 40, 41], [12], [11, 6, 23, 9] * 6)
ROOM = 256


@pytest.fixture(scope="module", params=list(SIZES))
def make(request, tmp_path_factory):
    sizes = {"eos_token_id": None, **SIZES[request.param]}
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_checkpoint(folder, request.param, **{**sizes, "num_experts": 16})
    base = ["model=folder", f"model.path={folder}", "model.dtype=float32", "device=cuda"]
    keys = ["workload=conversation", "model.context=256", "prefill.chunk_tokens=8"]
    return lambda *overrides: build_engine(compose([*base, *keys, *overrides]))


def say(conversation, prompt):
    seen = []
    turn = conversation.say(prompt, max_new_tokens=6, ignore_eos=True, on_logits=seen.append)
    return turn, torch.stack(seen)


def talk(engine):
    """Four turns, a branch from the second and a turn behind it: (prompt, turn, logits)."""
    conversation, line, said = Conversation(engine, room=ROOM), [], []
    for message in MESSAGES:
        line = [*line, *message]
        said.append((line, *say(conversation, line)))
        line = [*line, *said[-1][1].report.token_ids]
    branch = [*said[1][0][:-2], 44, 45, 46]
    said.append((branch, *say(conversation, branch)))
    line = [*branch, *said[-1][1].report.token_ids, 9, 8]
    said.append((line, *say(conversation, line)))
    return said


@pytest.mark.parametrize("mode", ["demand", "in_place", "always_stream", "auto"])
def test_turns_and_branches_have_the_bits_of_steps_that_are_not_captured(make, mode):
    with make(f"prefill={mode}", "cache.slots=12") as engine:
        assert engine.runtime.capturable
        captured = talk(engine)
        assert engine.sequence._graph is not None
        graph = engine.sequence._graph
        again = talk(engine)
        assert engine.sequence._graph is graph  # of the same tensors, wherever they begin
        engine.runtime.check()
    with make("cache=lru", "cache.slots=all") as engine:
        engine.runtime.capturable = False
        eager = talk(engine)
    for (_, one, a), (_, _, b), (_, other, c) in zip(captured, again, eager, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
        assert (one.cached, one.chunks) == (other.cached, other.chunks)


def test_a_turn_is_close_to_one_long_prompt(make):
    with make("cache.slots=all") as engine:
        said = talk(engine)
    with make("cache.slots=all", "prefill.chunk_tokens=256") as engine:
        for prompt, turn, logits in said:
            seen = []
            answer = turn.report.token_ids
            engine.generate(prompt, answer=answer, on_logits=seen.append, room=ROOM)
            torch.testing.assert_close(torch.stack(seen), logits, rtol=0, atol=5e-3)
