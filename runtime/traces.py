"""Recorded routes: an .npz with `expert_ids` [tokens, layers, k], ids within the layer.

`num_experts`, a number beside it, says how many experts a layer has; without it, the highest id
does.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace

EXPERT_IDS, NUM_EXPERTS = "expert_ids", "num_experts"


def read_trace(file: str, space: IdSpace) -> torch.Tensor:
    """int16 [N, L, K] of a trace that fits `space`.

    Raises ConfigError for a file that is missing, broken, or of another model's shape.
    """
    ids, num_experts = _load(file)
    recorded = (ids.shape[1], num_experts, ids.shape[2])
    if recorded != (space.num_layers, space.num_experts, space.top_k):
        raise _refused(
            file,
            f"it was recorded on {_shape(*recorded)}, but this model has "
            f"{_shape(space.num_layers, space.num_experts, space.top_k)}",
        )
    table_NLK = torch.from_numpy(ids.astype(np.int16))
    ascending_NLK = table_NLK.sort(dim=2).values
    if (ascending_NLK[..., 1:] == ascending_NLK[..., :-1]).any():
        raise _refused(file, "a token names an expert twice in one layer")
    return table_NLK


def _load(file: str) -> tuple[np.ndarray, int]:
    """The ids, checked for themselves, and the number of experts."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise _refused(file, "there is no such file")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            ids = np.asarray(arrays[EXPERT_IDS])
            stated = int(arrays[NUM_EXPERTS]) if NUM_EXPERTS in arrays else None
    except (ValueError, TypeError, KeyError, IndexError, OSError, EOFError) as error:
        raise _refused(file, f"not an .npz with {EXPERT_IDS} ({error})") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise _refused(file, f"damaged ({error})") from error
    if ids.ndim != 3 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise _refused(file, f"{EXPERT_IDS} is {ids.dtype} {list(ids.shape)}, not integer 3-D")
    highest = int(ids.max())
    num_experts = highest + 1 if stated is None else stated
    if ids.min() < 0 or not highest < num_experts <= np.iinfo(np.int16).max:
        raise _refused(file, f"expert ids from {ids.min()} to {highest} of {num_experts}")
    return ids, num_experts


def _refused(file: str, reason: str) -> ConfigError:
    return ConfigError(f"model.routing=trace:{file}: {reason}")


def _shape(num_layers: int, num_experts: int, top_k: int) -> str:
    return f"{num_layers} layers x {num_experts} experts, top-{top_k}"
