"""Tiny quantised checkpoints, written from a plain one, and the plain one they stand for."""

import json
from pathlib import Path

import torch
from conftest import write_checkpoint
from safetensors.torch import load_file, save_file

from residency.runtime.formats import Fp8Block, Mxfp4, Naming, Nvfp4

SINGLE = "model.safetensors"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": {"group_size": 16}}},
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def fp8_block(key, matrix):
    """Stored tensors by key, and the matrix that they stand for."""
    form = Fp8Block()
    stored = form.quantise(matrix)
    named = {key: stored[""], f"{key}_scale_inv": stored["scale"]}
    return named, form.dequantise(stored, torch.float32)


def modelopt(key, matrix):
    stored, plain = _one_outer(Nvfp4(Naming.MODELOPT), matrix, lambda outer: outer)
    named = {key: stored[""], f"{key}_scale": stored["scale"], f"{key}_scale_2": stored["outer"][0]}
    return named | {f"{key.removesuffix('weight')}input_scale": torch.tensor(0.5)}, plain


def compressed_tensors(key, matrix):
    stored, plain = _one_outer(Nvfp4(Naming.COMPRESSED_TENSORS), matrix, lambda x: 1 / (1 / x))
    named = {
        f"{key}_packed": stored[""],
        f"{key}_scale": stored["scale"],
        f"{key}_global_scale": 1 / stored["outer"][:1],
    }
    return named | {f"{key.removesuffix('weight')}input_global_scale": torch.tensor([9.0])}, plain


def _one_outer(form, matrix, rounded):
    """Stored with one outer scale, and the matrix that this stands for."""
    stored = {s: t[: len(t) // 2] for s, t in form.quantise(torch.cat([matrix, matrix])).items()}
    outer = rounded(stored["outer"]).expand(2)
    return stored, form.dequantise(stored | {"outer": outer}, torch.float32)


STORERS = {"fp8_block": fp8_block, "modelopt": modelopt, "compressed-tensors": compressed_tensors}
DECLARED = {"fp8_block": FP8, "modelopt": MODELOPT, "compressed-tensors": COMPRESSED}


def write_pair(folder: Path, naming: str, **changes) -> tuple[Path, Path]:
    """(quantised, plain): a qwen3_moe whose experts and attention are stored as `naming` says, and
    the same with all of that dequantised, float32.
    """
    plain = write_checkpoint(folder / "plain", "qwen3_moe", moe_intermediate_size=128, **changes)
    tensors = load_file(plain / SINGLE)
    quantised, dequantised = {}, {}
    for key, tensor in tensors.items():
        if key.endswith("proj.weight"):
            named, dequantised[key] = STORERS[naming](key, tensor)
            quantised |= named
        else:
            quantised[key] = dequantised[key] = tensor
    return _write(folder, plain, quantised, dequantised, DECLARED[naming])


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """(mxfp4, plain): a gpt_oss with stacked blocks and scales, and the same dequantised."""
    plain = write_checkpoint(
        folder / "plain",
        "gpt_oss",
        num_local_experts=8,
        intermediate_size=96,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
    )
    form = Mxfp4()
    tensors = load_file(plain / SINGLE)
    quantised, dequantised = {}, {}
    for key, tensor in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored = form.quantise(tensor.mT)
            quantised[f"{key}_blocks"] = stored[""].unflatten(-1, (-1, 16))
            quantised[f"{key}_scales"] = stored["scale"]
            dequantised[key] = form.dequantise(stored, torch.float32).mT
        else:
            quantised[key] = dequantised[key] = tensor
    return _write(folder, plain, quantised, dequantised, MXFP4)


def _write(folder, plain, quantised, dequantised, declared):
    _save(dequantised, plain / SINGLE)
    (folder / "quantised").mkdir()
    _save(quantised, folder / "quantised" / SINGLE)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": declared}
    (folder / "quantised" / "config.json").write_text(json.dumps(config))
    return folder / "quantised", plain


def _save(tensors, file):
    contiguous = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
