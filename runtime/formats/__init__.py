"""Expert formats: how the matrices of an expert are stored, in the readable form.

Pure torch: `dequantise` of each is the definition that kernels and host code are held against.
"""

import torch

from residency.runtime.formats.base import ELEMENTS, OUTER, SCALE, ExpertFormat, StoredPart
from residency.runtime.formats.detection import detect
from residency.runtime.formats.fp8_block import Fp8Block
from residency.runtime.formats.mxfp4 import Mxfp4
from residency.runtime.formats.nvfp4 import Naming, Nvfp4
from residency.runtime.formats.plain import Plain

FORMATS: dict[str, ExpertFormat] = {
    form.name: form
    for form in (
        Plain(torch.bfloat16),
        Plain(torch.float16),
        Plain(torch.float32),
        Fp8Block(),
        Nvfp4(),
        Mxfp4(),
    )
}

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "OUTER",
    "SCALE",
    "ExpertFormat",
    "Fp8Block",
    "Mxfp4",
    "Naming",
    "Nvfp4",
    "Plain",
    "StoredPart",
    "detect",
]
