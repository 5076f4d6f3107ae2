"""Which experts modules have kernels, and gpt-oss's own module against its kernels' view."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from residency.runtime.experts import Call, ExpertMath
from residency.runtime.formats import Fp8Block, Mxfp4, Nvfp4, Plain
from residency.runtime.fused import activation_of, kernel_shape
from residency.runtime.kernels.activations import SILU
from residency.runtime.kernels.decode_experts import down, gate_up
from residency.runtime.layout import RowLayout

HIDDEN, WIDTH, NUM_EXPERTS = 64, 32, 4


@pytest.fixture(scope="module")
def gpt_oss():
    sizes = dict(num_hidden_layers=1, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=32)
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=HIDDEN, intermediate_size=WIDTH, **sizes, **heads
    )
    torch.manual_seed(0)
    experts = AutoModelForCausalLM.from_config(config).model.layers[0].mlp.experts
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.5)
    return experts


def layout_of(module, form):
    shapes = {name: tuple(p.shape[1:]) for name, p in module.named_parameters()}
    return RowLayout.of(shapes, form, torch.float32, transposed=module.is_transposed)


def rows_of(module, layout):
    """The module's parameters in the format, one row an expert."""
    rows = torch.zeros(NUM_EXPERTS, layout.row_bytes, dtype=torch.uint8)
    views = layout.views(rows)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            views[name].copy_(parameter.data)
            continue
        for suffix, stored in layout.format.quantise(parameter.data.mT).items():
            views[layout.suffixes(name)[suffix]].copy_(stored)
    return rows


@pytest.mark.parametrize("form", [Plain(torch.float32), Mxfp4()], ids=lambda form: form.name)
def test_the_kernels_definition_and_plain_maths_equal_gpt_oss_s_own(gpt_oss, form):
    layout = layout_of(gpt_oss, form)
    rows = rows_of(gpt_oss, layout)
    shape = kernel_shape(layout, gpt_oss)
    assert (shape.hidden, shape.width, shape.interleaved) == (HIDDEN, WIDTH, True)
    assert shape.has_bias
    x = torch.randn(5, HIDDEN)
    weights, ids = torch.rand(5, NUM_EXPERTS).topk(2)
    call = Call(gpt_oss, x, ids, weights)
    everyone = list(range(NUM_EXPERTS))
    maths = ExpertMath(layout, rows)
    work = maths.begin(call)
    maths.run(work, everyone, everyone)
    row_of = torch.arange(NUM_EXPERTS, dtype=torch.int32)
    activated = gate_up(x, ids, weights, row_of, rows, shape, activation_of(gpt_oss))
    torch.testing.assert_close(down(activated, rows, shape), work.combined(), rtol=1e-4, atol=1e-3)
    if form == Plain(torch.float32):
        with torch.no_grad():
            assert torch.equal(work.combined(), gpt_oss(x, ids, weights))


def test_outer_factors_of_halves_have_no_kernel_for_alternate_rows(gpt_oss):
    assert kernel_shape(layout_of(gpt_oss, Nvfp4()), gpt_oss) is None


class Gated:
    """An experts module as most are."""

    is_transposed, has_bias, is_concatenated = False, False, True

    def __init__(self, act_fn):
        self.act_fn = act_fn

    def _default_apply_gate(self, gate_up):
        raise NotImplementedError

    _apply_gate = _default_apply_gate


@pytest.mark.parametrize("form", [Plain(torch.bfloat16), Fp8Block(), Nvfp4(), Mxfp4()])
def test_every_format_has_kernels(form):
    shapes = {"gate_up_proj": (256, 96), "down_proj": (96, 128)}
    layout = RowLayout.of(shapes, form, torch.bfloat16)
    module = Gated(torch.nn.SiLU())
    shape = kernel_shape(layout, module)
    assert (shape.hidden, shape.width, shape.row_bytes) == (96, 128, layout.row_bytes)
    assert activation_of(module) is SILU
    assert kernel_shape(layout, Gated(torch.nn.Tanh())) is None


def test_what_has_no_kernel_is_computed_in_plain_torch():
    shapes = {"gate_up_proj": (64, 96), "down_proj": (96, 32)}
    module = Gated(torch.nn.SiLU())
    for form in (Plain(torch.float64),):
        assert kernel_shape(RowLayout.of(shapes, form, torch.float64), module) is None
    odd = shapes | {"down_proj": (96, 48)}
    assert kernel_shape(RowLayout.of(odd, Plain(torch.float32), torch.float32), module) is None
    layout = RowLayout.of({"up_proj": (4, 4)}, Plain(torch.float32), torch.float32)
    assert kernel_shape(layout, SimpleNamespace(act_fn=None)) is None
