"""Experts on the host: the native library and torch's form against float64, in every format."""

import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch

from residency.policies.step import IdSpace
from residency.runtime.banks import Banks
from residency.runtime.formats import FORMATS
from residency.runtime.host_experts import (
    NativeHostExperts,
    TorchHostExperts,
    build,
    open_host_experts,
)
from residency.runtime.host_experts.build import BuildError, load
from residency.runtime.host_experts.gates import Gate
from residency.runtime.host_experts.native import CLAMPED_SWIGLU, SILU, Library
from residency.runtime.layout import RowLayout, part_name

EXPERTS, TOP_K = 7, 3
SIZES = {"fp8_block": (256, 128), "nvfp4": (160, 48), "mxfp4": (160, 96)}
CLAMPED = Gate(CLAMPED_SWIGLU, True, 1.702, 7.0)


@pytest.fixture(scope="module")
def library():
    try:
        return Library()
    except BuildError as error:
        pytest.skip(str(error))


def make(name, dtype, *, gate=Gate(SILU), transposed=False, seed=0):  # noqa: B008 - immutable
    """Banks of one layer with random codes, and its matrices and biases in float64."""
    torch.manual_seed(seed)
    hidden, width = SIZES.get(name, (72, 40))
    shapes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    if transposed:
        shapes = {key: shape[::-1] for key, shape in shapes.items()}
    if gate is CLAMPED:
        shapes |= {"gate_up_proj_bias": (2 * width,), "down_proj_bias": (hidden,)}
    layout = RowLayout.of(shapes, FORMATS[name], dtype, transposed=transposed)
    banks = Banks(IdSpace(1, EXPERTS, TOP_K), layout)
    views, exact = banks.weights(0), {}
    for matrix in ("gate_up_proj", "down_proj"):
        n, k = shapes[matrix][::-1] if transposed else shapes[matrix]
        stored = layout.format.quantise(torch.randn(EXPERTS, n, k) * 0.2)
        if stored[""].dtype in (torch.uint8, torch.float8_e4m3fn):  # every code there is
            codes = torch.randint(0, 256, stored[""].shape, dtype=torch.uint8)
            if stored[""].dtype == torch.float8_e4m3fn:
                codes[(codes & 0x7F) == 0x7F] = 0  # NaN
            stored[""] = codes.view(stored[""].dtype)
        parts = {suffix: views[part_name(matrix, suffix)] for suffix in stored}
        for suffix, tensor in stored.items():
            parts[suffix].copy_(tensor.reshape(parts[suffix].shape))
        exact[matrix] = layout.format.dequantise(parts, torch.float64)
    for bias in ("gate_up_proj_bias", "down_proj_bias"):
        if bias in views:
            views[bias].normal_(0, 0.3)
            exact[bias] = views[bias].double()
    return banks, exact


def expected(job, exact, gate, chosen):
    y = torch.zeros(job.y_TH.shape, dtype=torch.float64)
    for token, ids in enumerate(job.ids_TK.tolist()):
        for choice, e in enumerate(ids):
            if e not in chosen:
                continue
            z = exact["gate_up_proj"][e] @ job.x_TH[token].double()
            if gate is CLAMPED:
                z = z + exact["gate_up_proj_bias"][e]
                g, u = z[::2].clamp(max=7.0), z[1::2].clamp(-7.0, 7.0)
                act = (u + 1) * g * torch.sigmoid(1.702 * g)
            else:
                g, u = z.chunk(2)
                act = torch.nn.functional.silu(g) * u
            out = exact["down_proj"][e] @ act
            if gate is CLAMPED:
                out = out + exact["down_proj_bias"][e]
            y[token] += float(job.weights_TK[token, choice]) * out
    return y


def filled(host, num_tokens, chosen, seed=1):
    torch.manual_seed(seed)
    job = host.job(0, num_tokens)
    job.x_TH.copy_(torch.randn(job.x_TH.shape))
    job.ids_TK.copy_(torch.rand(num_tokens, EXPERTS).topk(TOP_K).indices)
    job.weights_TK.copy_(torch.rand(num_tokens, TOP_K))
    job.chosen_E.zero_()
    job.chosen_E[sorted(chosen)] = 1
    return job


def close(got, want, within=1e-4):
    """Within a share of the largest number."""
    torch.testing.assert_close(got.double(), want, rtol=0, atol=within * float(want.abs().max()))


CASES = [
    *((name, torch.float32, Gate(SILU), False) for name in FORMATS),
    *((name, torch.bfloat16, Gate(SILU), False) for name in ("bf16", "nvfp4")),
    ("mxfp4", torch.bfloat16, CLAMPED, False),
    ("fp32", torch.float32, CLAMPED, True),
    ("bf16", torch.bfloat16, CLAMPED, True),
]


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize(("name", "dtype", "gate", "transposed"), CASES)
def test_equal_to_float64(library, name, dtype, gate, transposed, num_tokens):
    banks, exact = make(name, dtype, gate=gate, transposed=transposed)
    host = NativeHostExperts(library, banks, gate, dtype, threads=2)
    chosen = {0, 2, 3, 6} if num_tokens > 1 else set(range(1, EXPERTS))
    job = filled(host, num_tokens, chosen)
    want = expected(job, exact, gate, chosen)
    assert want.abs().max() > 0
    host.run(job)
    # AVX-512 machines round what lies between the matrices to bfloat16, as GPUs do.
    pairs = dtype == torch.bfloat16 and name in ("nvfp4", "mxfp4")
    close(job.y_TH, want, 4e-3 if pairs else 1e-4)
    routed = set(job.ids_TK.flatten().tolist())
    assert job.stats[1:].tolist() == [len(routed & chosen), 1] and job.stats[0] > 0


WIDE_CASES = [
    *((name, torch.float32, 1e-4) for name in ("bf16", "fp8_block", "nvfp4", "mxfp4")),
    # Here what lies between the matrices is rounded to bfloat16.
    *((name, torch.bfloat16, 4e-3) for name in ("nvfp4", "mxfp4")),
]


@pytest.mark.parametrize(("name", "dtype", "within"), WIDE_CASES)
def test_sixteen_lanes_by_their_plain_definition(name, dtype, within):
    """The algorithm of AVX-512 machines, by the forms that any machine runs."""
    try:
        wide = Library("-DRESIDENCY_LANES=16")
    except BuildError as error:
        pytest.skip(str(error))
    banks, exact = make(name, dtype)
    host = NativeHostExperts(wide, banks, Gate(SILU), dtype, threads=2)
    job = filled(host, 3, {0, 1, 4, 5})
    host.run(job)
    close(job.y_TH, expected(job, exact, Gate(SILU), {0, 1, 4, 5}), within)


def test_bits_do_not_depend_on_threads_or_company(library):
    banks, _ = make("nvfp4", torch.float32)
    results = []
    for threads in (1, 2, 5):
        host = NativeHostExperts(library, banks, Gate(SILU), torch.float32, threads)
        for _ in range(20):
            job = filled(host, 8, {0, 1, 2, 5})
            host.run(job)
            results.append(job.y_TH.clone())
    assert all(torch.equal(results[0], result) for result in results)


def test_nothing_chosen_gives_zeros(library):
    banks, _ = make("bf16", torch.float32)
    host = NativeHostExperts(library, banks, Gate(SILU), torch.float32, threads=2)
    job = filled(host, 2, set())
    job.y_TH.fill_(7)
    host.run(job)
    assert not job.y_TH.any() and job.stats[1:].tolist() == [0, 1]


def test_two_pools_side_by_side(library):
    banks, exact = make("mxfp4", torch.float32)
    hosts = [NativeHostExperts(library, banks, Gate(SILU), torch.float32, 2) for _ in range(2)]
    jobs = [filled(host, 4, {1, 2, 3}, seed) for seed, host in enumerate(hosts)]

    def often(host, job):
        for _ in range(50):
            host.run(job)

    threads = [threading.Thread(target=often, args=pair) for pair in zip(hosts, jobs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        close(job.y_TH, expected(job, exact, Gate(SILU), {1, 2, 3}))


def module():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=72, moe_intermediate_size=40, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    return Qwen3MoeExperts(config)


def test_without_a_compiler_torch_serves_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    banks, exact = make("fp32", torch.float32)
    host = open_host_experts(banks, module(), torch.float32)
    assert isinstance(host, TorchHostExperts) and "no-such-compiler" in host.reason
    job = filled(host, 3, {0, 2})
    host.run(job)
    close(job.y_TH, expected(job, exact, Gate(SILU), {0, 2}))


def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="fatal error: no such thing"):
        load()


def test_the_facts_of_a_module_choose_the_native_form(library):
    banks, exact = make("fp32", torch.float32)
    host = open_host_experts(banks, module(), torch.float32, threads=2)
    assert isinstance(host, NativeHostExperts) and host.function_address
    job = filled(host, 1, {0, 1, 2, 3})
    host.run(job)
    close(job.y_TH, expected(job, exact, Gate(SILU), {0, 1, 2, 3}))
    assert host.read_rate() >= 0
    assert host.reason is None


@pytest.mark.parametrize("machine", ["sapphirerapids", "znver4"])
def test_the_library_builds_for_avx512(tmp_path, machine):
    try:
        compiler = build._compiler()
    except BuildError as error:
        pytest.skip(str(error))
    source = build.FOLDER / build.SOURCES[0]
    command = [*compiler, "-std=c++20", "-O1", f"-march={machine}", "-c", str(source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "o")], capture_output=True, text=True, timeout=120
    )
    if "unknown value" in done.stderr or "bad value" in done.stderr or sys.platform == "darwin":
        pytest.skip(f"this compiler does not know {machine}")
    assert done.returncode == 0, done.stderr


def test_the_wheel_ships_the_sources():
    root = Path(__file__).parents[2]
    config = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = config["package-data"]["residency.runtime.host_experts"]
    assert all(any(Path(name).match(glob) for glob in globs) for name in build.SOURCES)
