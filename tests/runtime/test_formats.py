"""Expert formats: hand-written vectors, every code, round trips, names of checkpoints, refusals."""

import pytest
import torch

from residency.policies.errors import CheckpointError
from residency.runtime.formats import FORMATS, Fp8Block, Mxfp4, Naming, Nvfp4, Plain, detect, e2m1
from residency.runtime.layout import RowLayout

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Norm of the error over that of normal weights: a bound of each format's step.
ERROR = {"bf16": 3e-3, "fp16": 4e-4, "fp32": 0, "fp8_block": 0.04, "nvfp4": 0.12, "mxfp4": 0.14}


def e4m3(byte):
    """By the definition of the format: bias 7, no infinities, all ones is no number."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def test_four_bit_vectors_by_hand():
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = torch.tensor([MAGNITUDES + [-m for m in MAGNITUDES]], dtype=torch.float64)
    assert torch.equal(e2m1.unpack(packed, torch.float64), values)
    assert torch.equal(e2m1.pack(values), packed)
    assert e2m1.pack(torch.tensor([1.0, -6.0])).tolist() == [0xF2]  # the even column is low


def test_rounding_to_four_bits_is_to_nearest_ties_to_even():
    found = {0.25: 0, 0.26: 0.5, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 5.01: 6, 99: 6}
    for value, nearest in found.items():
        for sign in (1, -1):
            packed = e2m1.pack(torch.tensor([sign * value, 0.0]))
            assert e2m1.unpack(packed, torch.float32)[0] == sign * nearest, value


def test_nvfp4_of_every_code_under_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [256 rows, 512 columns]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    scales[[127, 255]] = 1  # no numbers
    outer = torch.tensor([0.75, 3.0])
    stored = {"": codes, "scale": scales.view(torch.float8_e4m3fn), "outer": outer}
    got = Nvfp4().dequantise(stored, torch.float64)
    values = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    for row in range(256):
        factor = e4m3(int(scales[row, 0])) * (0.75 if row < 128 else 3.0)
        for byte in range(256):
            low, high = got[row, 2 * byte : 2 * byte + 2].tolist()
            assert (low, high) == (values[byte & 15] * factor, values[byte >> 4] * factor)


def test_mxfp4_of_every_scale():
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.full((256, 16), 0xF2, dtype=torch.uint8)
    got = Mxfp4().dequantise({"": codes, "scale": scales}, torch.float64)
    for byte in range(255):
        assert got[byte, :2].tolist() == [2.0 ** (byte - 127), -6 * 2.0 ** (byte - 127)]
    assert got[255].isnan().all()


def test_fp8_of_every_code_and_blocks_that_end_early():
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 130)
    codes[(codes & 127) == 127] = 0
    scale = torch.tensor([[1.0, 2.0], [0.5, 3.0]])
    stored = {"": codes.view(torch.float8_e4m3fn), "scale": scale}
    got = Fp8Block().dequantise(stored, torch.float64)
    for row in range(256):
        value = e4m3(int(codes[row, 0]))
        assert got[row, 0] == got[row, 127] == value * scale[row // 128, 0]
        assert got[row, 128] == got[row, 129] == value * scale[row // 128, 1]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_quantised_weights_come_back(form):
    """In the stored shapes; values that the format has come back as they were."""
    torch.manual_seed(0)
    matrix = torch.randn(3, 256, 320) * 0.02
    matrix[1, :4] = 0
    stored = form.quantise(matrix)
    parts = form.stored(256, 320)
    assert [part.suffix for part in parts] == list(stored)
    for suffix, shape, dtype in parts:
        assert stored[suffix].shape == (3, *shape) and stored[suffix].dtype == dtype
    back = form.dequantise(stored, torch.float64)
    assert (back - matrix).norm() <= ERROR[form.name] * matrix.norm()
    again = form.quantise(form.dequantise(stored, torch.float32))
    assert torch.equal(form.dequantise(again, torch.float64)[1, :4], back[1, :4])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(form.dequantise(stored, dtype), back.float().to(dtype))


def test_a_row_lays_parts_then_biases_at_64_bytes():
    shapes = {"gate_up_proj": (64, 96), "gate_up_proj_bias": (96,), "down_proj": (48, 64)}
    layout = RowLayout.of(shapes, Nvfp4(), torch.bfloat16, transposed=True)
    found = {part.name: (part.shape, part.dtype) for part in layout.parts}
    e4m3fn, fp32 = torch.float8_e4m3fn, torch.float32
    assert found == {
        "gate_up_proj": ((96, 32), torch.uint8),
        "gate_up_proj.scale": ((96, 4), e4m3fn),
        "gate_up_proj.outer": ((2,), fp32),
        "down_proj": ((64, 24), torch.uint8),
        "down_proj.scale": ((64, 3), e4m3fn),
        "down_proj.outer": ((2,), fp32),
        "gate_up_proj_bias": ((96,), torch.bfloat16),
    }
    assert list(found)[-1] == "gate_up_proj_bias"
    end = 0
    for part in layout.parts:
        assert part.offset == end
        end = -(-(end + part.num_bytes) // 64) * 64
    assert layout.row_bytes == end
    names = {"": "down_proj", "scale": "down_proj.scale", "outer": "down_proj.outer"}
    assert layout.suffixes("down_proj") == names


def test_a_plain_row_keeps_the_module_s_orientation():
    shapes = {"gate_up_proj": (64, 96), "down_proj": (48, 64)}
    layout = RowLayout.of(shapes, Plain(torch.float32), torch.float32, transposed=True)
    assert [part.shape for part in layout.parts] == [(64, 96), (48, 64)]
    matrix = torch.randn(96, 64)
    stored = layout.format.quantise(matrix)
    assert stored[""].shape == (64, 96)
    assert torch.equal(layout.format.dequantise(stored, torch.float32), matrix)


SOURCES = [
    (Plain(torch.bfloat16), "m.gate_proj.weight", ("m.gate_proj.weight", "")),
    (Fp8Block(), "m.up_proj.weight", ("m.up_proj.weight", "")),
    (Fp8Block(), "m.up_proj.weight_scale_inv", ("m.up_proj.weight", "scale")),
    (Fp8Block(), "m.up_proj.input_scale", None),
    (Nvfp4(), "m.w1.weight", ("m.w1.weight", "")),
    (Nvfp4(), "m.w1.weight_scale", ("m.w1.weight", "scale")),
    (Nvfp4(), "m.w1.weight_scale_2", ("m.w1.weight", "outer")),
    (Nvfp4(), "m.w1.input_scale", None),
    (Nvfp4(Naming.COMPRESSED_TENSORS), "m.w1.weight_packed", ("m.w1.weight", "")),
    (Nvfp4(Naming.COMPRESSED_TENSORS), "m.w1.weight_scale", ("m.w1.weight", "scale")),
    (Nvfp4(Naming.COMPRESSED_TENSORS), "m.w1.weight_global_scale", ("m.w1.weight", "outer")),
    (Nvfp4(Naming.COMPRESSED_TENSORS), "m.w1.input_global_scale", None),
    (Mxfp4(), "m.experts.gate_up_proj_blocks", ("m.experts.gate_up_proj", "")),
    (Mxfp4(), "m.experts.gate_up_proj_scales", ("m.experts.gate_up_proj", "scale")),
    (Mxfp4(), "m.experts.down_proj_bias", ("m.experts.down_proj_bias", "")),
]


@pytest.mark.parametrize(("form", "key", "source"), SOURCES, ids=lambda value: str(value)[:40])
def test_a_checkpoint_s_keys(form, key, source):
    assert form.source(key) == source
    assert form.ignores(key) is (source is None)


def test_a_checkpoint_s_tensors_become_stored_ones():
    modelopt, packed = Nvfp4(), Nvfp4(Naming.COMPRESSED_TENSORS)
    assert modelopt.convert("outer", torch.tensor(0.25)).tolist() == [0.25]
    assert packed.convert("outer", torch.tensor([4.0])).tolist() == [0.25]
    assert modelopt.convert("outer", torch.tensor([1.0, 2.0])).tolist() == [[1.0], [2.0]]
    blocks = torch.zeros(2, 6, 3, 16, dtype=torch.uint8)
    converted = Mxfp4().convert("", blocks)
    assert converted.shape == (2, 6, 48) and converted.data_ptr() == blocks.data_ptr()
    bias = torch.zeros(2, 6)
    assert Mxfp4().convert("", bias) is bias
    assert Fp8Block().convert("scale", torch.ones(2, 2).bfloat16()).dtype == torch.float32


GROUP_OF_16 = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
DETECTED = [
    (None, Plain(torch.bfloat16)),
    ({}, Plain(torch.bfloat16)),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, Fp8Block()),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": GROUP_OF_16}, Nvfp4()),
    ({"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, Nvfp4()),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": GROUP_OF_16,
        },
        Nvfp4(Naming.COMPRESSED_TENSORS),
    ),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4()),
]
REFUSED = [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "fp8"}, "one scale"),
    ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "[64, 128]"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
    ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "32"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
    ({"bits": 4}, "None"),
]


@pytest.mark.parametrize(("config", "form"), DETECTED)
def test_a_format_is_found(config, form):
    assert detect(config, torch.bfloat16) == form


@pytest.mark.parametrize(("config", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config, named):
    with pytest.raises(CheckpointError) as caught:
        detect(config, torch.bfloat16)
    message = str(caught.value)
    assert named in message and "128 x 128" in message and "mxfp4" in message


@pytest.mark.parametrize(
    ("form", "hidden", "width"), [(Fp8Block(), 256, 192), (Nvfp4(), 72, 32), (Mxfp4(), 64, 48)]
)
def test_experts_of_sizes_that_do_not_fit_are_refused(form, hidden, width):
    assert form.name in form.fault(hidden, width)
    assert form.fault(256, 256) is None
