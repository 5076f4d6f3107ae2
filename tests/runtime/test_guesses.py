"""Guesses of the next layer's routes: what its router would choose, at no cost to anything else."""

from types import SimpleNamespace

import architectures
import pytest
import torch
from conftest import tiny_engine
from torch import nn
from transformers import AutoModelForCausalLM

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.guesses import RouterGuess

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]
NUM_NEW = 4
CHOICE = ("cache=lrfu", "cache.slots=5", "prefill=demand", "prefill.chunk_tokens=7")


@pytest.fixture(scope="module", params=architectures.CONFIGS)
def engine(request, tiny_checkpoint):
    with tiny_engine(tiny_checkpoint(request.param), *CHOICE) as engine:
        yield engine


def guesses_of(engine):
    return RouterGuess(engine.model, engine.architecture.expert_modules)


def watch(engine, monkeypatch, see):
    """Let `see` hear of every (MoE layer, call) before the runtime does."""
    runtime, layer_of = engine.runtime, engine.runtime.layer
    monkeypatch.setattr(
        runtime, "layer", lambda layer, call: (see(layer, call), layer_of(layer, call))[1]
    )


def run(engine):
    """Logits of a run from nothing, and all that it has counted and left behind."""
    runtime, seen = engine.runtime, []
    runtime.forget()
    engine.generate(PROMPT, max_new_tokens=NUM_NEW, ignore_eos=True, on_logits=seen.append)
    state = runtime.pool.policy.state()
    left = [runtime.pool.slot_of, runtime.pool.id_of, runtime.clock, *state.values()]
    return torch.stack(seen), runtime.counters.rows(), [each.clone() for each in left]


def test_a_guess_is_what_the_next_router_chooses(engine, monkeypatch):
    """Asked about the next layer's own input, of chunks and of single tokens."""
    guesses, calls = guesses_of(engine), []
    watch(engine, monkeypatch, lambda *call: calls.append(call))
    run(engine)
    num_layers = engine.architecture.space.num_layers
    assert len(calls) == num_layers * (2 + NUM_NEW - 1)  # two chunks; dense layers do not count
    judged = 0
    for layer, call in calls:
        if layer > 0:
            ids_TK = guesses.guess(layer - 1, call.x_TH)
            assert ids_TK.dtype == torch.int64
            assert torch.equal(ids_TK, call.ids_TK)
            judged += 1
    assert judged == len(calls) - len(calls) // num_layers


def test_guessing_changes_nothing(engine, monkeypatch):
    logits, counts, left = run(engine)
    guesses, made = guesses_of(engine), []
    with monkeypatch.context() as patch:
        watch(engine, patch, lambda layer, call: made.append(guesses.guess(layer, call.x_TH)))
        guessing_logits, guessing_counts, guessing_left = run(engine)
    assert sum(ids is not None for ids in made)
    assert torch.equal(guessing_logits, logits)
    assert guessing_counts == counts
    for mine, theirs in zip(guessing_left, left, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_is_guessed_behind_the_last_layer(engine):
    guesses, last = guesses_of(engine), engine.architecture.space.num_layers - 1
    x_TH = torch.randn(2, 64)
    assert guesses.guess(last, x_TH) is None
    assert guesses.guess(last - 1, x_TH) is not None


def test_hooks_of_the_model_hear_of_no_guess(engine):
    guesses, heard = guesses_of(engine), []
    hooks = [
        module.register_forward_hook(lambda module, *_: heard.append(module))
        for module in engine.model.modules()
    ]
    guesses.guess(0, torch.randn(2, 64))
    for hook in hooks:
        hook.remove()
    assert not heard


@pytest.mark.parametrize("model_type", architectures.CONFIGS)
def test_a_guess_waits_for_no_host(model_type):
    """Tensors on the meta device have no values that a host could read."""
    config = architectures.config_of(model_type)
    architecture = Architecture.from_config(config, "bfloat16", "test")
    space = architecture.space
    guesses = RouterGuess(architecture.skeleton, architecture.expert_modules)
    for layer in range(space.num_layers - 1):
        ids_TK = guesses.guess(layer, torch.empty(5, 64, device="meta"))
        assert ids_TK.shape == (5, space.top_k)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen4_exp"])
def test_replaced_layers_are_guessed_alike(model_type):
    """A replacement joins weights and binds other forwards; the routers say what they said."""
    pytest.importorskip("triton")
    from residency.runtime.replacements import Seam, apply

    changes = {"linear_value_head_dim": 16} if model_type == "qwen4_exp" else {}
    config = architectures.config_of(model_type, **changes)
    names = Architecture.from_config(config, "float32", "test").expert_modules
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    architectures.fill(model)
    x_TH = torch.randn(6, 64)
    guesses = RouterGuess(model, names)
    before = [guesses.guess(layer, x_TH) for layer in range(len(names) - 1)]
    assert apply(model, Seam(position_of=lambda: 0), on_cpu=True)
    for again in (guesses, RouterGuess(model, names)):
        for layer, ids_TK in enumerate(before):
            assert torch.equal(again.guess(layer, x_TH), ids_TK)


class Needy(nn.Module):
    """A router that needs more than its block holds."""

    def forward(self, hidden_states, previous_states):
        raise AssertionError("it is never asked")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (SimpleNamespace(), "layers.1.mlp: no gate or router"),
        (SimpleNamespace(gate=Needy()), "layers.1.mlp.gate: its routes need previous_states"),
    ],
    ids=["no router", "a router that needs the layer before"],
)
def test_a_router_that_cannot_be_asked_is_named(block, message):
    model = SimpleNamespace(get_submodule=lambda name: block)
    with pytest.raises(CheckpointError, match=message):
        RouterGuess(model, ["layers.0.mlp.experts", "layers.1.mlp.experts"])


@pytest.mark.parametrize(("mode", "asks"), [("speculate", True), ("auto", False)])
def test_a_mode_that_learns_asks_nobody_where_nothing_can_be_fetched_meanwhile(
    checkpoint, mode, asks
):
    """On the CPU copies take the compute's time; who only guesses is told how often it is right."""
    with tiny_engine(checkpoint, f"prefill={mode}") as engine:
        asked = engine.runtime._prefill.learning.guess(0, torch.zeros(2, 32))
    assert (asked is not None) == asks
