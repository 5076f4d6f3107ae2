"""Decode steps that are declared capturable, held to it without a GPU.

Twice: on the CPU a step is captured by an emulated graph, which refuses what needs the host, and
its replays must give the eager steps' logits bit for bit; on the meta device, a device of its own,
no tensor of a step may lie on the host. The experts are transformers' `batched_mm` form, since the
runtime's own are proven apart.
"""

import architectures
import pytest
import torch
from conftest import tiny_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, StaticCache

from residency.runtime.capture import AS_WRITTEN, REASONS, reason_against_capture
from residency.runtime.replacements import REPLACEMENTS, gpt_oss
from residency.runtime.replacements.seam import Seam
from residency.testing.graphs import Capture, NotCapturableError

PROMPT = [5, 9, 77, 31, 2, 64, 8, 100, 3, 17, 90, 41]
NUM_STEPS = 8
CAPACITY = 32


def model_of(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="batched_mm", **options
    )
    return model.eval().requires_grad_(False)


def replaced(model):
    assert gpt_oss.replace(model, Seam(position_of=lambda: 0))  # one chunk, so always the first
    return model


def step(model, cache, ids):
    return model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def prefilled(model, prompt):
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    return cache, step(model, cache, torch.tensor([prompt]))


@torch.inference_mode()
def eager_run(model, prompt):
    """Tokens [1, 1] fed, and the logits behind each."""
    cache, logits = prefilled(model, prompt)
    tokens, seen = [], []
    for _ in range(NUM_STEPS):
        tokens.append(logits.argmax().view(1, 1))
        logits = step(model, cache, tokens[-1])
        seen.append(logits)
    return tokens, seen


@torch.inference_mode()
def replayed_run(model, prompt, tokens):
    """The logits behind each token: of one eager step, one captured, the others replayed."""
    cache, _ = prefilled(model, prompt)
    seen = [step(model, cache, tokens[0])]
    ids = tokens[1].clone()
    with Capture() as graph:
        out = step(model, cache, ids)
    seen.append(out.clone())
    for token in tokens[2:]:
        ids.copy_(token)
        graph.replay()
        seen.append(out.clone())
    return seen


def assert_replays_equal_eager(model, prompt=PROMPT):
    tokens, expected = eager_run(model, prompt)
    for replay, eager in zip(replayed_run(model, prompt, tokens), expected, strict=True):
        assert torch.equal(replay, eager)


@pytest.fixture(params=sorted(set(architectures.CONFIGS) - {"gpt_oss", "qwen4_exp"}))
def proven(request, tiny_checkpoint):
    return model_of(tiny_checkpoint(request.param))


def test_models_as_written_replay_as_they_run(proven):
    assert reason_against_capture(proven, replaced=False) is None
    assert_replays_equal_eager(proven)


@pytest.mark.parametrize("length", [3, 12])  # of a window of 8: filled within the replays, full
def test_replaced_gpt_oss_replays_as_it_runs(tiny_checkpoint, length):
    model = replaced(model_of(tiny_checkpoint("gpt_oss")))
    assert reason_against_capture(model, replaced=True) is None
    assert_replays_equal_eager(model, PROMPT[:length])


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen4_exp"])
def test_models_that_are_declared_not_to_be_capturable_are_not(tiny_checkpoint, model_type):
    model = model_of(tiny_checkpoint(model_type))
    assert reason_against_capture(model, replaced=False) in REASONS.values()
    with pytest.raises(NotCapturableError):
        assert_replays_equal_eager(model)


class HostTensors(TorchDispatchMode):
    """Notes operations that touch a tensor of the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, torch.Tensor)]
        self.found += [str(func) for t in tensors if t.device.type == "cpu"]
        return out


def host_operations(model):
    model = model.to("meta")
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
        for num in (len(PROMPT), 1):
            step(model, cache, torch.zeros(1, num, dtype=torch.int64, device="meta"))
        with HostTensors() as host:
            step(model, cache, torch.zeros(1, 1, dtype=torch.int64, device="meta"))
    return host.found


def test_every_tensor_of_a_step_lies_on_the_device(proven):
    assert host_operations(proven) == []


def test_every_tensor_of_a_replaced_step_lies_on_the_device(tiny_checkpoint):
    assert host_operations(replaced(model_of(tiny_checkpoint("gpt_oss")))) == []


def test_eager_attention_replays_as_it_runs(tiny_checkpoint):
    model = model_of(tiny_checkpoint("olmoe"), attn_implementation="eager")
    assert reason_against_capture(model, replaced=False) is None
    assert_replays_equal_eager(model)


def test_a_sliding_window_is_not_captured(tmp_path):
    """Python counts its tokens: a replay would repeat the position that was captured."""
    folder = architectures.write(tmp_path / "model", "mixtral", sliding_window=64)
    model = model_of(folder)
    assert "sliding-window" in reason_against_capture(model, replaced=False)
    with pytest.raises(AssertionError):
        assert_replays_equal_eager(model)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_attn_implementation_internal", "flash_attention_2", "flash_attention_2"),
        ("model_type", "unheard_of", "unheard_of was not proven"),
        ("rope_parameters", {"rope_type": "dynamic"}, "rotary embedding is dynamic"),
        ("rope_parameters", {"full": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_other_reasons(tiny_checkpoint, monkeypatch, name, value, words):
    model = model_of(tiny_checkpoint("olmoe"))
    monkeypatch.setattr(type(model.config), name, value, raising=False)
    monkeypatch.setitem(vars(model.config), name, value)
    assert words in reason_against_capture(model, replaced=False)


def test_what_is_declared_is_what_was_proven():
    """A type in either list has a test above; one with a replacement has its own tests."""
    configs = [architectures.config_of(name) for name in architectures.CONFIGS]
    text_types = {config.get_text_config().model_type for config in configs}
    assert AS_WRITTEN | set(REASONS) == text_types
    assert not AS_WRITTEN & set(REASONS)
    assert set(REPLACEMENTS) <= text_types


def test_a_report_says_why_decode_is_not_captured(tiny_checkpoint):
    with tiny_engine(tiny_checkpoint("qwen4_exp")) as engine:
        loaded = engine._loaded
        loaded.shape = object()  # as where kernels compute the experts
        loaded.fuse_layers(Seam(position_of=lambda: 0))
        assert not loaded.capturable
        reason = REASONS["qwen4_exp_text"]
        assert f"decode steps are not captured as a graph: {reason}" in loaded.notes
