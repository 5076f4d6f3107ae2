"""Every architecture on a GPU: captured steps, uncaptured steps and transformers' eager model."""

import architectures
import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from residency.conf import build_engine, compose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPT = [(7 * i + 3) % architectures.VOCABULARY for i in range(41)]
CHUNK_TOKENS = 24
NUM_NEW = 20
WIDTH_KEY = dict.fromkeys(("olmoe", "mixtral", "gpt_oss", "minimax_m2"), "intermediate_size")


def folder_of(root, model_type):
    """Sizes that the kernels take: hidden 128, experts 64 wide."""
    width = {WIDTH_KEY.get(model_type, "moe_intermediate_size"): 64}
    return architectures.write(root, model_type, hidden_size=128, initializer_range=0.1, **width)


@pytest.fixture(scope="module", params=architectures.CONFIGS)
def folder(request, tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("gpu") / request.param, request.param)


def engine_of(folder, dtype, *overrides):
    base = ("model=folder", f"model.path={folder}", f"model.dtype={dtype}", "device=cuda")
    chunk = f"prefill.chunk_tokens={CHUNK_TOKENS}"
    return build_engine(compose([*base, "cache.slots=5", chunk, *overrides]))


def generated(engine):
    """Tokens, and the logits [N, V] behind each."""
    seen = []
    report = engine.generate(PROMPT, max_new_tokens=NUM_NEW, ignore_eos=True, on_logits=seen.append)
    return report.token_ids, torch.stack(seen)


@torch.inference_mode()
def judged(folder, tokens, capacity):
    """The logits of transformers' eager model behind the prompt and behind each of `tokens`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    model = model.cuda().eval()
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    chunks = [*torch.tensor([PROMPT]).split(CHUNK_TOKENS, dim=1)]
    logits = [
        model(ids.cuda(), cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        for ids in [*chunks, *torch.tensor(tokens).view(-1, 1, 1)]
    ]
    return torch.stack(logits[len(chunks) - 1 :])


def test_captured_uncaptured_and_transformers_agree(folder):
    with engine_of(folder, "float32") as engine:
        capturable = engine.runtime.capturable
        said = any("not captured" in n or "plain torch" in n for n in engine.notes)
        assert capturable != said, "a step that is not captured is named in the notes"
        tokens, captured = generated(engine)
        again_tokens, again = generated(engine)  # the graph of the first, replayed throughout
        assert (engine.sequence._graph is not None) == capturable
        capacity = engine.sequence.capacity
        engine.runtime.capturable = False
        engine.sequences.forget()
        plain_tokens, plain = generated(engine)
        assert engine.sequence._graph is None
    assert tokens == again_tokens == plain_tokens
    torch.testing.assert_close(captured, again, rtol=0, atol=1e-4)
    torch.testing.assert_close(captured, plain, rtol=0, atol=1e-4)
    expected = judged(folder, tokens[:-1], capacity)
    torch.testing.assert_close(captured, expected, rtol=1e-3, atol=5e-3)


def test_bfloat16_with_forced_routes_is_close_to_plain_torch(folder):
    """Routing weights arrive in float32 or in bfloat16, as the family has it."""
    logits = []
    for kernels in ("true", "false"):
        routed = ("model.routing=even", f"device.kernels={kernels}")
        with engine_of(folder, "bfloat16", *routed) as engine:
            seen = []
            engine.generate(PROMPT, max_new_tokens=1, ignore_eos=True, on_logits=seen.append)
            logits.append(seen[0].float())
    difference = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert difference < 0.05, f"relative difference {difference:.3f}"
