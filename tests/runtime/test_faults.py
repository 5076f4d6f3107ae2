"""Bad days: memory that runs out, copies and devices that fail, pages that change underneath."""

import ctypes
import re
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from command import assert_one_line, assert_refused, residency
from conftest import tiny_engine
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from residency.conf import compose
from residency.policies.cache import CachePolicy
from residency.policies.errors import CapacityError, DeviceError, PolicyError
from residency.runtime.banks import Banks
from residency.runtime.decode import DecodeExecutor
from residency.runtime.faults import MENDS, Point, Work, armed
from residency.runtime.graphs import Graphs
from residency.runtime.loaded import Loaded
from residency.runtime.memory import GIB, MemoryPlan
from residency.runtime.pinning import Pinned
from residency.runtime.prefill import PrefillExecutor
from residency.runtime.sequence import DecodeStep

PROMPT = list(range(3, 20))
FEW = ("cache.slots=5", "prefill.chunk_tokens=9", "prefill.ring=2")
CUDA_OOM = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total\nof 8 GiB"
CPU_OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."
SHORT = [
    (torch.OutOfMemoryError(CUDA_OOM), "asked for 2.50 GiB more"),
    (RuntimeError(CPU_OOM), "asked for 3.00 GiB more"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), ""),
    (MemoryError(), ""),
]
PLAN = MemoryPlan(8, 8, 2, 8, 0, GIB, GIB, 0, GIB, GIB)  # 3 GiB on the device
GONE = torch.AcceleratorError("CUDA error: an illegal memory access\nwas encountered")


def fails(error, at=1):
    """An action that raises at the nth time."""
    calls = iter(range(1, 1 << 20))

    def action():
        if next(calls) == at:
            raise error

    return action


def logits(engine, **options):
    seen = []
    engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True, on_logits=seen.append, **options)
    return torch.stack(seen)


def assert_slots_hold_what_they_say(engine):
    """Every resident expert's bytes are in its slot."""
    engine.runtime.check()
    pool, banks = engine.runtime.pool, engine.banks
    for slot, held in enumerate(pool.id_of.tolist()):
        if held != pool.space.sink:
            layer, expert = divmod(held, pool.space.num_experts)
            assert torch.equal(engine.runtime.rows[slot], banks.layers[layer][expert])


# Memory.


EXECUTORS = {Point.PREFILL: PrefillExecutor, Point.DECODE: DecodeExecutor}


@pytest.mark.parametrize("point", EXECUTORS)
def test_memory_that_runs_out_in_a_step_is_one_line_and_the_engine_goes_on(checkpoint, point):
    with tiny_engine(checkpoint, *FEW) as engine:
        expected = logits(engine)
        for number, (error, words) in enumerate(SHORT):
            assert_ran_out(engine, point, fails(error, at=2 + number), words)
            assert torch.equal(logits(engine), expected)
            assert_slots_hold_what_they_say(engine)


def assert_ran_out(engine, point, fail, words):
    """In the middle of a step: the layer's experts are admitted and not all there."""
    layer, key = EXECUTORS[point].layer, MENDS[point].split()[1].rstrip(",")

    def behind(*args):
        out = layer(*args)
        fail()
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXECUTORS[point], "layer", behind)
        with pytest.raises(CapacityError) as caught:
            logits(engine)
    assert_one_line(str(caught.value), f"host memory ran out at {point}", "planned: ", words)
    assert_one_line(str(caught.value), "5 slots", "lower ", key)
    assert not (engine.runtime.pool.slot_of >= 0).any()


@pytest.mark.parametrize("point", [Point.LOAD, Point.POOL])
def test_memory_that_runs_out_before_a_run(point):
    """And the same command works when there is memory again."""
    words = ("run", "device=cpu", "workload.max_new_tokens=2", "cache.slots=9")
    with armed(point, fails(torch.OutOfMemoryError(CUDA_OOM))):
        assert_refused(residency(*words), f"ran out at {point}", "9 slots", *MENDS[point].split())
    assert residency(*words).exit_code == 0


def test_what_ran_out_of_memory_holds_none_of_it():
    """The error that is told may live on in a notebook, its tensors must not."""
    freed = []

    class Large:
        def __del__(self):
            freed.append(True)

    def work():
        large = Large()
        raise torch.OutOfMemoryError(str(large and CUDA_OOM))

    with pytest.raises(CapacityError) as caught, Work(Point.POOL, PLAN, torch.device("cpu")):
        work()
    assert caught.value.__cause__ is not None and freed


def test_other_policies_that_do_not_fit_leave_the_old_ones_running(checkpoint):
    other = compose(["cache=lru", "cache.slots=8"]).policies
    with tiny_engine(checkpoint, *FEW) as engine:
        expected = logits(engine)
        action = fails(torch.OutOfMemoryError(CUDA_OOM))
        with (
            armed(Point.POOL, action),
            pytest.raises(CapacityError, match="taking slots"),
            engine.reconfigured(other),
        ):
            pass
        assert torch.equal(logits(engine), expected)


def test_a_capture_without_memory_is_refused_and_not_silently_left_out(checkpoint, monkeypatch):
    with tiny_engine(checkpoint, *FEW) as engine:
        expected = logits(engine)
        monkeypatch.setattr(engine.runtime, "capturable", True)
        error = torch.OutOfMemoryError(CUDA_OOM)
        with armed(Point.CAPTURE, fails(error)), pytest.raises(CapacityError) as caught:
            logits(engine)
        assert_one_line(str(caught.value), "ran out at capturing", "so that the graph has room")
        monkeypatch.setattr(engine.runtime, "capturable", False)
        assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_OOM), KeyboardInterrupt()])
def test_what_broke_a_capture_is_told_and_not_what_that_did_to_it(monkeypatch, error):
    @contextmanager
    def graph(*_, **__):
        try:
            yield
        except BaseException:
            raise RuntimeError("operation failed due to a previous error during capture") from None

    def forward(ids):
        raise error

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    runtime = SimpleNamespace(recorded=lambda *_: nullcontext())
    with pytest.raises(type(error)):
        DecodeStep(runtime, forward)._capture(torch.zeros(1, 1, dtype=torch.int64))


def test_a_chunks_graph_without_memory_is_no_reason_to_run_without_graphs(monkeypatch):
    class Graph:
        def capture_begin(self, **_):
            pass

        def capture_end(self):
            raise RuntimeError("capture was invalidated")

    for name, fake in {
        "Stream": lambda *_: None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def body():
        raise torch.OutOfMemoryError(CUDA_OOM)

    graphs = Graphs()
    with pytest.raises(RuntimeError), Work(Point.PREFILL, PLAN):
        graphs._capture(body)
    assert graphs.captures
    monkeypatch.setattr(Graph, "capture_begin", lambda *_, **__: None)
    with pytest.warns(RuntimeWarning, match="without graphs"):
        assert graphs._capture(lambda: None) is None


# A GPU that others use as well.


@pytest.fixture
def shared_gpu(monkeypatch):
    """8 GiB, of which 1 is free, this process has 2, and somebody else 5."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * GIB)
    return torch.device("cuda", 0)


def test_a_gpu_that_is_taken_is_refused_before_and_told_after(shared_gpu, monkeypatch):
    held = "this process holds 2.00 and other processes and CUDA itself 5.00"
    monkeypatch.setattr("residency.runtime.memory.free_host_bytes", lambda: 100 * GIB)
    with pytest.raises(CapacityError) as before:
        PLAN.check(shared_gpu)
    assert_one_line(str(before.value), "device memory: 3.00 GiB needed, 1.00 GiB free", held)
    with pytest.raises(CapacityError) as after, Work(Point.PREFILL, PLAN, shared_gpu):
        raise torch.OutOfMemoryError(CUDA_OOM)
    assert_one_line(str(after.value), "device memory ran out at prefill", held)


# Copies and devices.


@pytest.mark.parametrize("mode", ["always_stream", "hit_d2d", "demand"])
def test_a_copy_that_fails_leaves_no_expert_without_its_bytes(checkpoint, mode):
    with tiny_engine(checkpoint, f"prefill={mode}", *FEW) as engine:
        expected = logits(engine)
        for at in (1, 2, 5, 9, 14):
            action = fails(RuntimeError("CUDA error: invalid argument\nmore"), at)
            with armed(Point.COPY, action), pytest.raises(DeviceError) as caught:
                logits(engine)
            assert_one_line(str(caught.value), "failed at copying experts", "invalid argument")
            assert_slots_hold_what_they_say(engine)
            assert torch.equal(logits(engine), expected)


def test_a_copy_that_fails_ends_a_command_in_one_line(tmp_path):
    with armed(Point.COPY, fails(RuntimeError("CUDA error: unknown error"), at=4)):
        result = residency("run", "device=cpu", "workload.max_new_tokens=2", "--out", tmp_path)
    assert_refused(result, "the device failed at copying experts: CUDA error: unknown error")
    assert not list(tmp_path.iterdir())


def test_a_fault_that_is_told_only_with_the_result(checkpoint):
    """As GPUs do it: no step sees it, whoever asks for a value does."""
    with tiny_engine(checkpoint, *FEW) as engine:
        expected = logits(engine)

        def read(_):
            raise GONE

        with pytest.raises(DeviceError, match=r"failed at generating: .* illegal memory access$"):
            engine.generate(PROMPT, max_new_tokens=2, on_logits=read)
        assert not (engine.runtime.pool.slot_of >= 0).any(), "what is in them is not known"
        assert torch.equal(logits(engine), expected)


def test_a_device_that_answers_no_more_is_lost_and_says_so(checkpoint, monkeypatch):
    def answers_no_more():
        raise GONE

    with tiny_engine(checkpoint, *FEW) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runtime.lanes, "synchronize", answers_no_more)
            with armed(Point.COPY, fails(GONE)), pytest.raises(DeviceError) as caught:
                logits(engine)
        words = ("answers no more", "illegal memory access", "start it again")
        assert_one_line(str(caught.value), *words)
        with pytest.raises(DeviceError) as again:
            logits(engine)
        assert str(again.value) == str(caught.value)


def test_an_interrupt_while_a_step_is_undone_does_not_leave_it_half_undone(checkpoint, monkeypatch):
    with tiny_engine(checkpoint, *FEW) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runtime.lanes, "synchronize", fails(KeyboardInterrupt(), at=2))
            with armed(Point.COPY, fails(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
                logits(engine)
        with pytest.raises(DeviceError, match="was not undone"):
            logits(engine)


def test_an_error_of_the_code_stays_what_it_is():
    for error in (RuntimeError("shapes [2] and [3] differ"), ValueError("x"), KeyError("y")):
        with pytest.raises(type(error)) as caught, Work(Point.PREFILL, PLAN):
            raise error
        assert caught.value is error


# Pinning.


class Driver:
    """cudart, as far as pinning goes. cap: bytes that it registers in all."""

    def __init__(self, cap=1 << 40):
        self.cap, self.held, self.calls = cap, {}, 0

    def cudaHostRegister(self, pointer, num_bytes, flags):
        self.calls += 1
        assert pointer not in self.held, "registered twice"
        if sum(self.held.values()) + num_bytes > self.cap:
            return 2
        self.held[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer):
        del self.held[pointer]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return made


@pytest.mark.parametrize("cap", [0, 250])
def test_pinning_that_is_refused_or_capped_leaves_nothing_pinned(driver, cap):
    driver.cap = cap
    tensors = [torch.zeros(100, dtype=torch.uint8) for _ in range(4)]
    with pytest.raises(CapacityError) as caught:
        Pinned(tensors, None)
    assert_one_line(
        str(caught.value), "cannot be pinned", "ulimit -l", "device.allow_pageable=true"
    )
    assert driver.calls > cap // 100 and not driver.held


@pytest.fixture
def pinning(driver, monkeypatch):
    """Engines on the CPU pin as those of a GPU do."""
    pin = Loaded._pin

    def on_a_gpu(self, *args):
        device, self.device = self.device, torch.device("cuda")
        try:
            return pin(self, *args)
        finally:
            self.device = device

    monkeypatch.setattr(Loaded, "_pin", on_a_gpu)
    return driver


KERNELS = "residency.runtime.loaded.Loaded._kernel_shape"


def test_pages_are_let_go_by_an_engine_that_ends_and_by_one_that_fails(
    checkpoint, pinning, monkeypatch
):
    monkeypatch.setattr(KERNELS, lambda self: None)
    with tiny_engine(checkpoint):
        assert len(pinning.held) == 3
    assert not pinning.held
    with armed(Point.POOL, fails(MemoryError())), pytest.raises(CapacityError):
        tiny_engine(checkpoint)
    assert not pinning.held
    monkeypatch.setattr(KERNELS, lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_engine(checkpoint)
    assert not pinning.held


def test_pageable_banks_are_a_note_only_where_they_were_asked_for(checkpoint, pinning, monkeypatch):
    monkeypatch.setattr(KERNELS, lambda self: None)
    pinning.cap = 1000
    with pytest.raises(CapacityError, match="allow_pageable"):
        tiny_engine(checkpoint)
    monkeypatch.setattr(
        "residency.runtime.devices.base.Device.engine_options", lambda _: {"allow_pageable": True}
    )
    with tiny_engine(checkpoint) as engine:
        assert any(note.startswith("banks are pageable") for note in engine.notes)
    assert not pinning.held


# Banks that change underneath.


def flip(banks, layer, expert, byte, bit=0):
    """As a faulty memory cell does, past torch."""
    rows = banks.layers[layer]
    place = rows.data_ptr() + expert * rows.shape[1] + byte
    ctypes.c_uint8.from_address(place).value ^= 1 << bit


def test_a_page_that_changes_is_found_before_the_report(checkpoint):
    with tiny_engine(checkpoint, "debug.verify_banks=true") as engine:
        report = engine.generate(PROMPT, max_new_tokens=2)
        (note,) = [note for note in report.notes if note.startswith("banks verified: 24 experts")]
        assert re.search(r"\(\d+\.\d GB/s\)", note)
        flip(engine.banks, 1, 6, 77)
        with pytest.raises(DeviceError) as caught:
            engine.generate(PROMPT, max_new_tokens=2)
        assert_one_line(str(caught.value), "layer 1, expert 6 no longer holds", "start again")
        flip(engine.banks, 1, 6, 77)
        with pytest.raises(DeviceError, match="layer 1, expert 6"):
            engine.generate(PROMPT, max_new_tokens=2)  # slots may hold what was wrong


def test_banks_are_not_verified_unless_asked(checkpoint):
    with tiny_engine(checkpoint) as engine:
        flip(engine.banks, 1, 6, 77)
        report = engine.generate(PROMPT, max_new_tokens=2)
        assert not any("verified" in note for note in report.notes)


@pytest.fixture(scope="module")
def small_banks(checkpoint):
    with tiny_engine(checkpoint) as engine:
        return Banks(engine.banks.space, engine.banks.layout)


@examples(max_examples=60)
@given(data=st.data())
def test_any_bit_of_any_row_is_noticed(small_banks, data):
    layer = data.draw(st.integers(0, small_banks.space.num_layers - 1))
    expert = data.draw(st.integers(0, small_banks.space.num_experts - 1))
    byte = data.draw(st.integers(0, small_banks.layout.row_bytes - 1))
    small_banks.remember()
    assert small_banks.changed() == []
    flip(small_banks, layer, expert, byte, data.draw(st.integers(0, 7)))
    assert small_banks.changed() == [(layer, expert)]


# A policy whose numbers are none.


class Undefined(CachePolicy):
    """Divides by what may be zero."""

    def allocate(self, space, device):
        super().allocate(space, device)
        self.rate = torch.zeros(space.num_ids + 1, device=device)

    def state(self):
        return super().state() | {"rate": self.rate}

    def touch(self, ids, step):
        self.keys[ids] = step.token
        self.rate[ids] /= self.rate[ids] * 0


def test_a_policy_that_makes_nan_is_stopped_by_name(checkpoint):
    with tiny_engine(checkpoint, *FEW) as engine:
        policies = type(engine.policies)(
            Undefined(Undefined.Config(slots=6)), engine.policies.prefill, engine.policies.decode
        )
        with engine.reconfigured(policies), pytest.raises(PolicyError) as caught:
            engine.generate(PROMPT, max_new_tokens=2)
        assert_one_line(str(caught.value), "touch makes NaN of rate", "; the rule: ")
        engine.generate(PROMPT, max_new_tokens=2)
