"""Which format a checkpoint's experts have, by its own `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from residency.policies.errors import CheckpointError
from residency.runtime.formats.base import ExpertFormat
from residency.runtime.formats.fp8_block import BLOCK, Fp8Block
from residency.runtime.formats.mxfp4 import Mxfp4
from residency.runtime.formats.nvfp4 import GROUP, Naming, Nvfp4
from residency.runtime.formats.plain import Plain

SUPPORTED = (
    "bf16, fp16 and fp32 without quantization, fp8 with blocks of 128 x 128, nvfp4 with groups of "
    "16 (modelopt, compressed-tensors), and mxfp4"
)


def detect(quantization_config: Mapping[str, Any] | None, dtype: torch.dtype) -> ExpertFormat:
    """The experts' format; None or nothing in the config means plain elements of dtype.

    Takes config.json's `quantization_config` or the whole of ModelOpt's `hf_quant_config.json`.
    Raises CheckpointError, naming what is there and what is supported.
    """
    if not quantization_config:
        return Plain(dtype)
    inner = quantization_config.get("quantization")
    config = dict(inner if isinstance(inner, Mapping) else quantization_config)
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    known: dict[Any, Callable[[Mapping[str, Any]], ExpertFormat]] = {
        "fp8": _fp8,
        "modelopt": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "mxfp4": lambda config: Mxfp4(),
    }
    if method not in known:
        raise _refused(f"quant_method {method}")
    return known[method](config)


def _fp8(config: Mapping[str, Any]) -> ExpertFormat:
    blocks = config.get("weight_block_size")
    if blocks is None:
        raise _refused("fp8 with one scale for a tensor or row")
    if list(blocks) != [BLOCK, BLOCK]:
        raise _refused(f"fp8 with weight_block_size {list(blocks)}")
    if (form := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"fp8 with fmt {form}")
    return Fp8Block()


def _modelopt(config: Mapping[str, Any]) -> ExpertFormat:
    if (algorithm := config.get("quant_algo")) != "NVFP4":
        raise _refused(f"modelopt with quant_algo {algorithm}")
    weights = [config, *(g.get("weights") or {} for g in _groups(config))]
    for group_size in (w.get("group_size") for w in weights):
        if group_size not in (None, GROUP):
            raise _refused(f"nvfp4 with group_size {group_size}")
    return Nvfp4(Naming.MODELOPT)


def _compressed_tensors(config: Mapping[str, Any]) -> ExpertFormat:
    if (form := config.get("format")) != "nvfp4-pack-quantized":
        raise _refused(f"compressed-tensors with format {form}")
    for group in _groups(config):
        group_form = group.get("format") or form
        if group_form != form:
            raise _refused(f"compressed-tensors with a group of format {group_form}")
        if (group_size := (group.get("weights") or {}).get("group_size")) not in (None, GROUP):
            raise _refused(f"nvfp4 with group_size {group_size}")
    return Nvfp4(Naming.COMPRESSED_TENSORS)


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((config.get("config_groups") or {}).values())


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config: {what} is not supported; experts may be {SUPPORTED}"
    )
