"""`residency inspect`: sizes that the runtime then takes, from headers alone."""

import json
import shutil

import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine, write_checkpoint
from quantised import SINGLE, write_pair

from residency.runtime.checkpoint import LENGTH_BYTES
from residency.runtime.inspection import RESERVED_BYTES
from residency.runtime.memory import plan_memory

GIB = 1 << 30
WIDE = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("modelopt"), "modelopt")[0]


def inspected(*args):
    result = residency("inspect", *args, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def test_what_it_says_is_what_an_engine_takes(quantised):
    sizes = inspected(quantised, "model.context=256", "model.dtype=float32", "prefill.groups=2")
    with tiny_engine(quantised, "model.context=256", "prefill.groups=2") as engine:
        plan = engine.runtime.plan.as_dict()
        model = sum(p.nbytes for p in engine.model.parameters())
        gpu = torch.device("cuda")  # whose pools it tells of
        on_gpu = plan_memory(engine.architecture, engine.policies, 256, device=gpu)
        banks = engine.banks
        assert sizes["expert_bytes"] == banks.layout.row_bytes
        assert sizes["layer_bytes"] == banks.layers[0].nbytes
        assert sizes["bank_bytes"] == sum(rows.nbytes for rows in banks.layers)
    assert sizes["weight_bytes"] == model
    assert sizes["workspace_bytes"] == on_gpu.workspace_bytes > 0
    for key in ("dequantised_bytes", "staging_bytes", "kv_bytes"):
        if key in plan:
            assert sizes[key] == plan[key], key
    assert sizes["dequantised_bytes"] > 0
    assert sizes["staging_bytes"] == plan["staging_rows"] * plan["row_bytes"]
    assert sizes["kv_bytes"] == 256 * sizes["kv_bytes_per_token"]


def test_it_names_the_shape_and_the_format(quantised):
    sizes = inspected(quantised)
    expected = {
        "model_type": "qwen3_moe",
        "moe_layers": 3,
        "dense_layers": 0,
        "experts": 8,
        "top_k": 2,
        "shared_experts": 0,
        "cycle": 6,
        "format": "nvfp4",
        "format_source": str(quantised / "config.json"),
        "made_up": False,
    }
    assert {key: sizes[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("qwen2_moe", {}, (3, 0, 1)),
        (
            "glm4_moe",
            dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, head_dim=16),
            (2, 1, 2),
        ),
    ],
)
def test_dense_layers_and_shared_experts(tmp_path, model_type, changes, expected):
    sizes = inspected(write_checkpoint(tmp_path, model_type, **changes))
    assert tuple(sizes[k] for k in ("moe_layers", "dense_layers", "shared_experts")) == expected


def test_a_pool_is_what_is_left_of_the_memory():
    sizes = inspected("qwen3_30b_a3b", "model.context=4096")
    own = ("weight", "staging", "kv", "workspace", "graph", "policy")
    fixed = sum(sizes[f"{key}_bytes"] for key in own)
    assert sizes["fixed_bytes"] == fixed + RESERVED_BYTES
    assert [pool["memory_bytes"] // GIB for pool in sizes["pools"][:7]] == [
        *(8, 12, 16, 24, 32, 48, 80)
    ]
    for pool in sizes["pools"][:6]:
        left = pool["memory_bytes"] - sizes["fixed_bytes"]
        assert pool["slots"] == left // sizes["expert_bytes"]
        assert pool["share"] == pool["slots"] / (48 * 128)
        assert pool["cycles"] == pool["slots"] / (48 * 8)
    assert sizes["pools"][6]["slots"] == 48 * 128


def test_a_pool_that_does_not_hold_one_step_is_none():
    sizes = inspected("qwen3_30b_a3b", "model.context=40960", "prefill.groups=1")
    assert sizes["pools"][0]["slots"] == 0
    shown = residency("inspect", "qwen3_30b_a3b", "model.context=40960", "prefill.groups=1")
    assert "does not fit" in shown.stdout


def test_this_machine_s_device_is_among_them(monkeypatch):
    class Properties:
        name, total_memory = "a device", 5 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    last = inspected("demo")["pools"][-1]
    assert (last["device"], last["memory_bytes"]) == ("this machine's a device", 5 * GIB)


def test_the_tables(quantised):
    shown = residency("inspect", quantised, env=WIDE).stdout
    for word in ("qwen3_moe", "nvfp4", "config.json", "3 MoE, 0 dense", "8, top-2", "24 GB"):
        assert word in shown
    for word in ("dequantised", "KV cache of a token", "experts that a token touches", "100.0%"):
        assert word in shown
    assert "made up" in residency("inspect", "gpt_oss_20b", env=WIDE).stdout


def test_it_reads_headers_alone(quantised, tmp_path):
    """The same of a shard of which only the header is there, and the rest a hole."""
    folder = shutil.copytree(quantised, tmp_path / "model")
    whole = (folder / SINGLE).read_bytes()
    header = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")
    with (folder / SINGLE).open("wb") as file:
        file.write(whole[:header])
        file.truncate(len(whole))
    differ = {"model", "format_source"}
    sizes, others = inspected(folder), inspected(quantised)
    assert {k: v for k, v in sizes.items() if k not in differ} == {
        k: v for k, v in others.items() if k not in differ
    }


@pytest.mark.parametrize("name", ["a 'quoted' folder", "${oc.env:HOME}", "a=b", "é \\ ,[x]"])
def test_a_folder_of_any_name(quantised, tmp_path, name):
    folder = shutil.copytree(quantised, tmp_path / name)
    assert inspected(folder)["model"] == str(folder / "config.json")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("qwen3_30b",), ("qwen3_30b: no such folder", "did you mean qwen3_30b_a3b?")),
        (("/tmp/no/such/folder",), ("/tmp/no/such/folder: no such folder", "demo")),
        (("model=folder",), ("model.path",)),
        (("demo", "cache=lru"), ("cache=lru", "model and prefill alone")),
        (("demo", "model.context=-1"), ("model.context=-1", "1 to")),
        (("demo", "prefill.ring=0"), ("prefill.ring=0",)),
        (("demo", "model.pth=x"), ("pth",)),
    ],
)
def test_wrong_input_is_one_line(args, words):
    assert_refused(residency("inspect", *args), *words)


def test_a_folder_without_a_model_is_one_line(tmp_path):
    assert_refused(residency("inspect", tmp_path), tmp_path, "no config.json")
    (tmp_path / "config.json").write_text("{}")
    assert_refused(residency("inspect", tmp_path), tmp_path)
