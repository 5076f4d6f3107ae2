"""How often each expert was referenced, read from a file of counts or of recorded routes."""

from __future__ import annotations

import ast
import json
import math
import zipfile
from pathlib import Path

import torch

from residency.policies.step import IdSpace

COUNTS, EXPERT_IDS = "counts", "expert_ids"
_UNREADABLE = OSError, KeyError, TypeError, ValueError, SyntaxError, RuntimeError
_MAGIC = b"\x93NUMPY"
_DTYPES = {
    "u1": torch.uint8,
    "i1": torch.int8,
    "u2": torch.uint16,
    "i2": torch.int16,
    "u4": torch.uint32,
    "i4": torch.int32,
    "i8": torch.int64,
}


def read_counts(file: str, space: IdSpace | None = None) -> torch.Tensor:
    """int64 [L, E] references, from one of three forms of file.

    A .json with a list of E numbers for each MoE layer, alone or as `counts`; an .npz with integer
    `counts` [L, E]; an .npz with recorded routes `expert_ids` [tokens, L, k], which are counted.
    space: the shape that it must fit, None for any.

    Raises ValueError, with the reason, for anything else.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        if not (path.suffix == ".json" or zipfile.is_zipfile(path)):
            raise TypeError("it is no .npz and no .json")
        counts_LE = _from_json(path) if path.suffix == ".json" else _from_npz(path, space)
    except _UNREADABLE as error:
        raise ValueError(f"neither counts nor routes can be read from it ({error})") from error
    if counts_LE.ndim != 2 or counts_LE.numel() == 0 or (counts_LE < 0).any():
        raise ValueError(f"it holds {list(counts_LE.shape)} numbers, not a count for each expert")
    if space is not None and counts_LE.shape != (space.num_layers, space.num_experts):
        found = " x ".join(map(str, counts_LE.shape))
        raise ValueError(
            f"it counts {found} experts, and the model has {space.num_layers} x {space.num_experts}"
        )
    return counts_LE


def _from_json(path: Path) -> torch.Tensor:
    content = json.loads(path.read_text())
    counts = content[COUNTS] if isinstance(content, dict) else content
    if not all(type(count) is int for layer in counts for count in layer):
        raise TypeError("counts are whole numbers")
    return torch.tensor(counts, dtype=torch.int64)


def _from_npz(path: Path, space: IdSpace | None) -> torch.Tensor:
    with zipfile.ZipFile(path) as archive:
        if f"{COUNTS}.npy" in archive.namelist():
            return _array(archive, COUNTS)
        ids_NLK = _array(archive, EXPERT_IDS)
        if ids_NLK.ndim != 3 or ids_NLK.numel() == 0 or ids_NLK.min() < 0:
            raise TypeError(f"{EXPERT_IDS} is not [tokens, layers, k] ids")
        num_experts = int(ids_NLK.max()) + 1
        if "num_experts.npy" in archive.namelist():
            num_experts = max(num_experts, int(_array(archive, "num_experts")))
    if space is not None:
        num_experts = max(num_experts, space.num_experts)
    layers = ids_NLK.transpose(0, 1).flatten(1)
    return torch.stack([layer.bincount(minlength=num_experts) for layer in layers])


def _array(archive: zipfile.ZipFile, name: str) -> torch.Tensor:
    """An integer array of an .npz as int64. The format: numpy.lib.format, versions 1 to 3."""
    content = archive.read(f"{name}.npy")
    if content[:6] != _MAGIC:
        raise TypeError(f"{name} is not an array")
    width = 2 if content[6] == 1 else 4
    begin = 8 + width
    end = begin + int.from_bytes(content[8:begin], "little")
    header = ast.literal_eval(content[begin:end].decode())
    dtype = _DTYPES.get(header["descr"].lstrip("|<"))
    if dtype is None or header["fortran_order"]:
        raise TypeError(f"{name} is {header['descr']}, not integers in C order")
    shape = header["shape"]
    if not math.prod(shape):
        return torch.zeros(shape, dtype=torch.int64)
    data = bytearray(content[end:])
    return torch.frombuffer(data, dtype=dtype, count=math.prod(shape)).long().reshape(shape)
