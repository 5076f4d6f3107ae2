"""The table in docs/architectures.md says what the code says."""

from pathlib import Path

import architectures
import pytest

from residency.runtime.architecture import Architecture
from residency.runtime.capture import AS_WRITTEN, REASONS
from residency.runtime.fused import kernel_shape
from residency.runtime.replacements import REPLACEMENTS

PAGE = Path(__file__).resolve().parents[2] / "docs/architectures.md"
FORMATS = {"bf16", "fp8_block", "nvfp4", "mxfp4"}
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("| ").split("|")]]
}


def what_the_code_says(architecture):
    """GPU and graph decode, as the table words them."""
    gpu = "kernels" if kernel_shape(architecture.layout, architecture.experts(0)) else "plain torch"
    model_type = architecture.skeleton.config.get_text_config().model_type
    if model_type in REPLACEMENTS:
        return gpu, "replaced"
    assert (model_type in AS_WRITTEN) != (model_type in REASONS)
    return gpu, "as written" if model_type in AS_WRITTEN else f"no: {REASONS[model_type]}"


@pytest.mark.parametrize("model_type", architectures.CONFIGS)
def test_a_row_says_what_the_code_says(model_type):
    config = architectures.config_of(model_type)
    architecture = Architecture.from_config(config, "bfloat16", "test")
    _, _, gpu, graph, _ = ROWS[model_type]
    assert (gpu, graph) == what_the_code_says(architecture)


def test_every_architecture_has_a_row_in_order():
    assert list(ROWS) == list(architectures.CONFIGS)


@pytest.mark.parametrize("model_type", architectures.CONFIGS)
def test_a_row_claims_no_more_than_was_judged(model_type):
    """Loading and the CPU by tests/runtime/test_judge.py, which runs every config."""
    loads, cpu, _, _, formats = ROWS[model_type]
    assert (loads, cpu) == ("yes", "bit for bit")
    assert set(formats.split(", ")) <= FORMATS
