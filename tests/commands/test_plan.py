"""`residency plan`: what it recommends fits and composes, and what does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from command import assert_refused, residency
from conftest import tiny_engine
from machines import machine
from omegaconf import OmegaConf

from residency.conf import compose
from residency.conf.build import build_part
from residency.conf.options import GROUPS
from residency.policies.errors import ConfigError
from residency.runtime.forecast.budget import parse_size
from residency.runtime.machine.profile import write_machine
from residency.runtime.memory import GIB, plan_memory

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
WIDE = {"COLUMNS": "200"}
BIG = ("qwen3_30b_a3b", "model.routing=even")
SIZES = ("--gpu-memory", "24GiB", "--host-memory", "128GiB")


def planned(*args):
    result = residency("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    file = tmp_path_factory.mktemp("machine") / "h200.json"
    write_machine(file, machine(), "--out")
    return file


@pytest.fixture(scope="module")
def big(h200, tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    return planned(*BIG, *SIZES, "--machine", h200, "--out", file), file


def test_what_it_recommends_is_what_the_engine_would_take(big):
    plan, file = big
    memory = plan["memory"]
    assert memory["device_bytes"] - memory["reserve_bytes"] + memory["reserved_bytes"] <= 24 * GIB
    assert (
        memory["device_bytes"]
        - memory["reserve_bytes"]
        + memory["reserved_bytes"]
        + memory["row_bytes"]
        > 24 * GIB
    )
    config = composed_of(OmegaConf.to_container(OmegaConf.load(file), resolve=True))
    model = config["model"]
    from residency.runtime.offload import Policies

    policies = Policies(config["cache"], config["prefill"], config["decode"])
    own = plan_memory(model.architecture, policies, model.context, device=torch.device("cuda"))
    for key in ("num_slots", "staging_rows", "kv_bytes", "workspace_bytes", "bank_bytes"):
        assert own.as_dict()[key] == memory[key], key


def composed_of(tree):
    """The parts of a tree, as `--config FILE` reads them."""
    return {group: build_part(group, tree[group]) for group in GROUPS}


def test_its_config_is_a_composed_tree(big):
    plan, file = big
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    assert tree == plan["config"]
    assert set(tree) == set(compose().tree)
    overrides = [choice["override"] for choice in plan["choices"]]
    words = [f"model={BIG[0]}", BIG[1], "workload=bench", *(" ".join(overrides).split())]
    assert compose(words).tree == tree


def test_times_are_told_by_length_and_hit_rate(big):
    plan, _ = big
    cold = [one["cold"] for one in plan["prompts"] if one["mode"] == "auto"]
    assert [one["num_tokens"] for one in cold] == [16, 64, 256, 512, 1024, 4096]
    for one in plan["prompts"]:
        link_s = one["cold"]["link_bytes"] / 55e9
        assert one["cold"]["seconds"] >= link_s * (1 - 1e-9)
        assert one["warm"]["seconds"] <= one["cold"]["seconds"] * (1 + 1e-9)
    targets = {one["target"]: one for one in plan["decodes"]}
    assert set(targets) == {"gpu", "hybrid", "cpu"}
    for target in ("gpu", "hybrid"):
        seconds = [step["seconds"] for step in targets[target]["steps"]]
        assert seconds == sorted(seconds, reverse=True)
    best = min(targets, key=lambda name: targets[name]["estimated"]["seconds"])
    assert f"decode={best}" in [choice["override"] for choice in plan["choices"]]


def test_what_is_asked_for_is_kept(h200):
    asked = ("decode=gpu", "prefill=demand", "prefill.groups=16", "cache=lru", "cache.slots=500")
    plan = planned(*BIG, *asked, "model.context=2048", *SIZES, "--machine", h200)
    assert plan["memory"]["num_slots"] == 500 and plan["context"] == 2048
    assert [one["target"] for one in plan["decodes"]] == ["gpu"]
    tree = plan["config"]
    assert tree["prefill"]["groups"] == 16 and tree["prefill"]["_target_"].endswith("Demand")
    assert any("500 slots are less than" in line for line in plan["warnings"]) is False
    few = planned(*BIG, *asked[:-1], "cache.slots=100", *SIZES)
    assert any("100 slots are less than one token's 384" in line for line in few["warnings"])


def test_a_bench_of_the_model_gives_its_constants():
    folders = ("flash-nvfp4-gpu-even", "flash-nvfp4-cpu-even")
    measured = [word for name in folders for word in ("--measured", RESULTS / name)]
    words = ("flash_next_moe", "model.layers=24", "model.routing=even")
    plan = planned(*words, *SIZES, *measured)
    assert plan["exact"] and len(plan["sources"]) == 2
    at_512 = next(one for one in plan["prompts"] if one["cold"]["num_tokens"] == 512)
    assert at_512["cold"]["seconds"] == pytest.approx(0.615, rel=0.02)
    targets = {one["target"]: one["estimated"]["seconds"] for one in plan["decodes"]}
    assert targets["cpu"] == pytest.approx(13.78e-3, rel=0.03)  # of that very run
    assert "decode=hybrid" in [choice["override"] for choice in plan["choices"]]
    other = residency("plan", *BIG, *SIZES, *measured[:2])
    assert_refused(other, "it measured 12288 experts of 2764928 bytes", "bench this model")


def test_little_memory_is_cut_into_smaller_groups_and_chunks():
    roomy, tight = (
        planned(*BIG, "--gpu-memory", size, "--host-memory", "128GiB") for size in ("24GiB", "6GiB")
    )
    assert tight["memory"]["staging_bytes"] < roomy["memory"]["staging_bytes"]
    assert tight["memory"]["workspace_bytes"] < roomy["memory"]["workspace_bytes"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((*BIG, "--gpu-memory", "2GiB", "--host-memory", "128GiB"), ("GPU memory", "weights")),
        ((*BIG, "--gpu-memory", "24GiB", "--host-memory", "32GiB"), ("host memory", "54.00 GiB")),
        (
            (*BIG, "cache.slots=6000", *SIZES),
            ("GPU memory", "6000 slots 52.73 GiB", "lower cache.slots"),
        ),
        (
            (*BIG, "model.context=40960", "--gpu-memory", "7GiB", *SIZES[2:]),
            ("model.context=20480",),
        ),
        (("qwen3_30b_a3", *SIZES), ("no such model", "did you mean qwen3_30b_a3b?")),
        ((*BIG, "cache=lrx", *SIZES), ("there is no such cache", "did you mean")),
        ((*BIG, "--gpu-memory", "24 parsecs"), ("--gpu-memory=24 parsecs", "24GiB")),
        ((*BIG, "device=cpu", *SIZES), ("--gpu-memory 24GiB", "device=cpu")),
        ((*BIG, *SIZES, "--measured", "nowhere"), ("--measured nowhere", "cannot be read")),
        ((*BIG, *SIZES, "--machine", "nowhere"), ("--machine nowhere", "no such file")),
        ((*BIG, *SIZES, "--measured", RESULTS / "admission"), ("holds no result",)),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(args, words):
    assert_refused(residency("plan", *args), *words)


def test_a_file_is_not_replaced_unasked(tmp_path):
    (tmp_path / "plan.yaml").write_text("mine")
    asked = ("plan", "device=cpu", "--out", tmp_path / "plan.yaml")
    assert_refused(residency(*asked), "is there already", "--force")
    assert residency(*asked, "--force").exit_code == 0
    assert "cache" in OmegaConf.load(tmp_path / "plan.yaml")


def test_without_a_profile_it_says_so_and_tells_no_times():
    shown = residency("plan", *BIG, *SIZES, env=WIDE).stdout
    assert "no times are predicted: no GPU was measured here" in shown
    assert "predicted (ms)" not in shown and "decode=gpu" in shown


def test_it_says_what_is_predicted_and_from_what(h200):
    shown = residency("plan", *BIG, *SIZES, "--machine", h200, env=WIDE).stdout
    for word in (
        *("Time to the first token, predicted", "A decoded token, predicted", "slots", "staging"),
        *("KV of 8,192 tokens", "workspace of the largest chunk", "tokens' worth", "reserve"),
        *("predicted, not measured, from: rates of NVIDIA H200", "every expert as likely"),
    ):
        assert word in shown, word


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("1.5g", 3 * GIB // 2), ("512 MB", GIB // 2)]
)
def test_sizes(text, size):
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0G", "1e9", "24", "24B", "24GiBs"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="must be a size"):
        parse_size(text, "--gpu-memory")


def test_a_plan_of_a_checkpoint_on_the_cpu_is_near_its_run(checkpoint, tmp_path, monkeypatch):
    """Within a factor of 5: compute is estimated from shapes, and the machine does other things."""
    import torch

    from residency.runtime.machine import sizes
    from residency.runtime.machine.computing import products
    from residency.runtime.machine.copies import device_copies, gathers, pinned_copies
    from residency.runtime.machine.layers import layers
    from residency.runtime.machine.probes import examine

    effort = sizes.Effort(2, 16 << 20, 4 << 20, 128)
    monkeypatch.setattr(sizes.Effort, "of", classmethod(lambda cls, device, *, quick: effort))
    chosen = [pinned_copies, gathers, device_copies, products, layers]
    profile = examine(torch.device("cpu"), probes={probe.__name__: probe for probe in chosen})
    write_machine(tmp_path / "cpu.json", profile, "--out")
    words = (checkpoint, "device=cpu", "model.dtype=float32", "cache.slots=all")
    plan = planned(*words, "--machine", tmp_path / "cpu.json")
    prompt = next(one["warm"] for one in plan["prompts"] if one["mode"] == "auto")
    (decode,) = plan["decodes"]
    with tiny_engine(checkpoint, "cache.slots=all", "prefill=auto") as engine:
        ids = list(range(prompt["num_tokens"]))
        reports = [engine.generate(ids, max_new_tokens=8, ignore_eos=True) for _ in range(3)]
    ttft = min(report.ttft_s for report in reports)
    tpot = min(report.tpot_s for report in reports)
    assert 0.2 < prompt["seconds"] / ttft < 5
    assert 0.2 < decode["steps"][-1]["seconds"] / tpot < 5
