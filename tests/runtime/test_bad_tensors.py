"""Tensors that cannot be what the config and the format make them: file and key are named."""

import json
import shutil

import pytest
import torch
from conftest import write_checkpoint
from quantised import FP8, MODELOPT, SINGLE, STORERS, write_gpt_oss, write_pair
from safetensors.torch import load_file, save_file

from residency.policies.errors import CheckpointError
from residency.runtime.architecture import Architecture
from residency.runtime.checkpoint import Checkpoint, Entry
from residency.runtime.weights import CheckpointWeights

CPU = torch.device("cpu")
KINDS = (*STORERS, "mxfp4", "plain")
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
STACKED = "model.layers.1.mlp.experts.gate_up_proj"
# Of each kind: the endings of an expert's elements, its scales, and what lies above them.
ENDINGS = {
    "fp8_block": ("", "_scale_inv"),
    "modelopt": ("", "_scale", "_scale_2"),
    "compressed-tensors": ("_packed", "_scale", "_global_scale"),
}
PARTS = [(kind, GATE + ending) for kind, endings in ENDINGS.items() for ending in endings]
PARTS += [("mxfp4", f"{STACKED}_blocks"), ("mxfp4", f"{STACKED}_scales")]
PARTS += [("mxfp4", f"{STACKED}_bias"), ("plain", GATE)]
SCALES = [(kind, key) for kind, key in PARTS if "scale" in key]
DENSE = [(kind, QUERY + ending) for kind, endings in ENDINGS.items() for ending in endings[1:]]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folders = {}
    for kind in STORERS:
        folders[kind], _ = write_pair(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=2)
    folders["mxfp4"], _ = write_gpt_oss(tmp_path_factory.mktemp("mxfp4"))
    folders["plain"] = write_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3_moe")
    return folders


@pytest.fixture
def damaged(originals, tmp_path):
    """Copies the checkpoint of a kind and lets `edit` change its tensors."""

    def damage(kind, edit):
        folder = shutil.copytree(originals[kind], tmp_path / "model")
        tensors = load_file(folder / SINGLE)
        edit(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder

    return damage


def load(folder):
    weights = CheckpointWeights(Architecture.of(folder, "auto"), folder)
    weights.banks(CPU, None)
    weights.model(CPU)


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_undamaged_checkpoint_loads(originals, kind):
    load(originals[kind])


@pytest.mark.parametrize(("kind", "key"), PARTS)
def test_a_part_that_is_missing(damaged, kind, key):
    folder = damaged(kind, lambda tensors: tensors.pop(key))
    named = () if kind == "mxfp4" else (key,)  # all of the layer's experts lack it
    refused(folder, folder, "lacks", "gate_up_proj", "of expert", "layers.1", *named)


@pytest.mark.parametrize(("kind", "key"), [*PARTS, *DENSE])
def test_a_part_of_another_shape(damaged, kind, key):
    def edit(tensors):
        wider = torch.cat([tensors[key].reshape(-1)] * 2)
        tensors[key] = wider.reshape(2, -1) if "_2" in key or "global" in key else wider

    folder = damaged(kind, edit)
    refused(folder, folder / SINGLE, key, "has shape", "the config makes it")


@pytest.mark.parametrize(("kind", "key"), [p for p in PARTS if "scale" not in p[1]])
def test_elements_of_another_dtype(damaged, kind, key):
    def edit(tensors):
        tensors[key] = torch.zeros(tensors[key].shape, dtype=torch.int32)

    refused(damaged(kind, edit), SINGLE, key, "I32")


@pytest.mark.parametrize(("kind", "key"), [("fp8_block", GATE), ("modelopt", QUERY)])
def test_one_matrix_that_was_left_in_another_format(damaged, kind, key):
    def edit(tensors):
        shape = tensors[key].shape
        tensors[key] = torch.zeros(shape, dtype=torch.bfloat16)

    refused(damaged(kind, edit), SINGLE, key, "has dtype BF16")


@pytest.mark.parametrize(("kind", "key"), [*SCALES, *DENSE])
def test_a_scale_that_is_no_number(damaged, kind, key):
    def edit(tensors):
        scale = tensors[key].reshape(-1)
        bits = {torch.uint8: 255, torch.float8_e4m3fn: 0x7F}
        if scale.dtype in bits:
            scale.view(torch.uint8)[-1] = bits[scale.dtype]
        else:  # the reciprocal of 0 is infinite
            scale[-1] = 0.0 if "global" in key else torch.nan

    refused(damaged(kind, edit), SINGLE, key, "NaN or infinite")


@pytest.mark.parametrize(("kind", "key"), DENSE)
def test_a_dense_scale_that_is_missing(damaged, kind, key):
    folder = damaged(kind, lambda tensors: tensors.pop(key))
    refused(folder, SINGLE, QUERY)


def test_an_expert_that_is_there_in_two_spellings(damaged):
    def edit(tensors):
        keys = [f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(8)]
        tensors["model.layers.1.mlp.experts.down_proj"] = torch.stack([tensors[k] for k in keys])

    folder = damaged("plain", edit)
    refused(folder, folder / SINGLE, "experts.0.down_proj", "same place", "experts.down_proj")


def test_a_dense_weight_in_fp8_without_a_scale(damaged):
    key = "model.layers.0.self_attn.o_proj.weight"

    def edit(tensors):
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)

    refused(damaged("plain", edit), SINGLE, key, "F8_E4M3", "no scale")


@pytest.mark.parametrize(
    ("declared", "width", "words"),
    [
        (FP8, 96, ("fp8_block", "96", "128")),
        (MODELOPT, 40, ("nvfp4", "40", "16")),
        ({"quant_method": "gptq", "bits": 4}, 64, ("quant_method gptq", "not supported")),
    ],
)
def test_what_the_config_asks_for_and_cannot_be(tmp_path, declared, width, words):
    folder = write_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=width)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    refused(folder, folder / "config.json", *words)


def test_modelopt_may_say_it_in_a_file_of_its_own(originals, tmp_path):
    folder = shutil.copytree(originals["modelopt"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, SINGLE, "the config makes it")
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    load(folder)
    own["quantization"]["quant_algo"] = "W4A8"
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    refused(folder, folder / "hf_quant_config.json", "W4A8")
    (folder / "hf_quant_config.json").write_text("{")
    refused(folder, folder / "hf_quant_config.json", "cannot be read")


def test_a_dtype_that_is_not_read(originals):
    entry = next(iter(Checkpoint(originals["plain"]).entries.values()))
    other = Entry("a.key", entry.file, (4,), "C64", 0, 32)
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor a.key: dtype C64"):
        _ = other.dtype
