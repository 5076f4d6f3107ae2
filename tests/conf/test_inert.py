"""Invariant 5, nothing accepted is inert: each key changes something that can be observed."""

import json
from contextlib import nullcontext

import architectures
import pytest
import torch
from conftest import tiny_engine

from residency.conf import build_engine, compose
from residency.conf.options import GROUPS, option_names, option_node
from residency.conf.replaying import ask
from residency.conf.root import root_leaves
from residency.policies.cache.lru import Lru
from residency.policies.errors import CapacityError, ConfigError, DeviceError, WorkloadError
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.bench.measure import Meter
from residency.runtime.bench.modes import Course
from residency.runtime.chat_template import ChatTemplate
from residency.runtime.loaded import Loaded
from residency.runtime.sessions.session import read_sessions
from residency.runtime.slots import SlotPool

PROMPT = list(range(3, 23))
NUM_NEW = 6
SPACE = IdSpace(num_layers=3, num_experts=8, top_k=2)  # of the tiny checkpoint


@pytest.fixture(scope="module")
def demo():
    """The demo model, which has a tokenizer."""
    with build_engine(compose(["device=cpu", "cache.slots=all"])) as engine:
        yield engine


class Bench:
    """Runs one option with one of its keys at two values, and what each run showed."""

    def __init__(self, checkpoint, demo, choice):
        self.checkpoint = checkpoint
        self.demo = demo
        self.choice = choice

    def compose(self, *overrides):
        return compose([self.choice, *self.required, *overrides])

    @property
    def required(self):
        """Keys without which the option cannot be had."""
        if self.choice == "model=folder":
            return [f"model.path={self.checkpoint}"]
        if self.choice == "cache=static":
            return [f"cache.profile={self.profile([9, 9, 0, 0, 0, 0, 0, 0])}"]
        return []

    def profile(self, counts):
        """A file that counts every layer's experts so."""
        file = self.checkpoint.parent / f"profile{''.join(map(str, counts))}.json"
        file.write_text(json.dumps([counts] * SPACE.num_layers))
        return file

    def pool(self, *overrides):
        cache = self.compose(*overrides).policies.cache
        return SlotPool(SPACE, cache.num_slots(SPACE), cache, torch.device("cpu"))

    def admitted(self, *overrides, phase=Phase.DECODE):
        """The slots that two experts of the second layer are given."""
        step = Step(torch.tensor(0), 1, phase)
        pool = self.pool("cache.slots=6", *overrides)
        pool.admit(torch.tensor([0, 1]), step)
        return [slot for slot, i in enumerate(pool.id_of.tolist()) if i != SPACE.sink]

    @property
    def is_made_up(self):
        """Too large to load here; what is known without weights is judged instead."""
        group, _, name = self.choice.partition("=")
        return group == "model" and name not in ("demo", "folder")

    def asked(self, *overrides):
        """(prompts, max_new_tokens) of each generation that a bench runs, the decodes first."""
        keys = ("lengths=[4]", "decode_tokens=2", "repeats=1", "warmups=0")
        modes = ("modes=[always_stream]", "crossing=[]", "pools=[cold]")
        by_turns = self.choice == "workload=prefill_modes"
        short = [f"workload.{key}" for key in (*keys, *(modes if by_turns else ()))]
        workload = self.compose(*short, *overrides).workload
        calls = []
        model = (f"model.path={self.checkpoint}", "model.dtype=float32", "device=cpu")
        config = compose(["model=folder", *model, "cache.slots=all"])
        with (
            build_engine(config, batch=workload.batch) as engine,
            pytest.MonkeyPatch.context() as patch,
        ):
            real = engine.generate_batch

            def generate_batch(prompts, **kwargs):
                calls.append((prompts, kwargs["max_new_tokens"]))
                return real(prompts, **kwargs)

            patch.setattr(engine, "generate_batch", generate_batch)
            if by_turns:
                take_turns(engine, workload.contest)
            else:
                meter = Meter(engine, workload.plan)
                meter.decode()
                list(meter.prefills(lambda samples: None))
        return calls

    def plan(self, *overrides):
        with tiny_engine(self.checkpoint, self.choice, *self.required, *overrides) as engine:
            return engine.runtime.plan

    def prefill(self, *overrides):
        """Prefill's lookups and bytes by source, of the second of two equal prompts."""
        few = (self.choice, "cache.slots=12", *overrides)
        with tiny_engine(self.checkpoint, *few) as engine:
            engine.generate(PROMPT, max_new_tokens=1)
            totals = engine.generate(PROMPT, max_new_tokens=1).phases[0]
            return totals.bytes | {"lookups": totals.lookups}

    def ahead(self, *overrides):
        """Experts that prefill fetched ahead of routers."""
        with tiny_engine(self.checkpoint, self.choice, "cache.slots=12", *overrides) as engine:
            return engine.generate(PROMPT, max_new_tokens=1).phases[0].ahead

    def keys(self, *overrides):
        with tiny_engine(self.checkpoint, self.choice, "cache.slots=5", *overrides) as engine:
            engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
            return engine.policies.cache.keys.clone()

    def report(self, *overrides):
        short = f"workload.max_new_tokens={NUM_NEW}"
        return self.compose(short, *overrides).workload.run(self.demo)

    def tokens(self, *overrides):
        """Of one answer."""
        short = (f"workload.max_new_tokens={NUM_NEW}", *overrides)
        if self.choice == "workload=chat":
            return self.compose(*short).workload.run(self.demo).say("ROMEO").report.token_ids
        if self.choice == "workload=conversation":
            own = ("workload.replies=generated", "workload.max_turns=1")
            said = self.compose(*own, *short).workload.said
            template = ChatTemplate(self.demo.tokenizer)
            ((line,),) = said.scripts(self.demo, template, read_sessions("")[:1])
            return line.answer
        return self.report("workload.ignore_eos=true", *overrides).token_ids

    def conversed(self, *overrides):
        """The report of conversations with the tiny model, and the generations behind it."""
        keys = ("sessions=1", "max_turns=1", "max_new_tokens=2", "repeats=1", "warmups=0")
        short = [f"workload.{key}" for key in (*keys, "modes=[]")]
        model = (f"model.path={self.checkpoint}", "model.dtype=float32", "device=cpu")
        config = self.compose("model=folder", *model, *short, *overrides)
        with build_engine(config) as engine, pytest.MonkeyPatch.context() as patch:
            count, real = [], engine.generate
            patch.setattr(engine, "generate", lambda *a, **k: count.append(a) or real(*a, **k))
            return config.workload.run(engine), len(count)


def take_turns(engine, contest):
    """All of a contest but the limits of the machine."""
    for prefix in contest.prefix:
        list(Course(engine, contest, prefix).stages(contest.modes))


def slots(bench):
    """plan.num_slots"""
    for asked, num_slots in (("5", 5), ("50%", 12)):
        assert bench.pool(f"cache.slots={asked}").num_slots == num_slots
        if bench.choice == "cache=lru":  # a plan asks every policy alike
            assert bench.plan(f"cache.slots={asked}").num_slots == num_slots


def scope(bench):
    """which slots a layer may take"""
    assert bench.admitted("cache.scope=global") == [0, 1]
    assert bench.admitted("cache.scope=per_layer") == [2, 3]


def admit_prefill(bench):
    """whether a prompt's misses enter slots"""
    assert bench.admitted(phase=Phase.PREFILL) == [0, 1]
    assert bench.admitted("cache.admit_prefill=false", phase=Phase.PREFILL) == []


def admit_decode(bench):
    """whether decode's misses enter slots"""
    assert bench.admitted("cache.admit_decode=false") == []
    assert bench.admitted("cache.admit_prefill=false") == [0, 1]


def history(bench):
    """the ranks of experts that were evicted"""
    assert not torch.equal(bench.keys("cache.history=kept"), bench.keys("cache.history=reset"))


def half_life(bench):
    """the ranks of experts used before the last halving"""
    assert not torch.equal(bench.keys("cache.half_life=1"), bench.keys("cache.half_life=2"))


def follow(bench):
    """the ranks of what followed"""
    assert not torch.equal(bench.keys("cache.follow=0"), bench.keys("cache.follow=2"))


def memory(bench):
    """the ranks of what followed long ago"""
    assert not torch.equal(bench.keys("cache.memory=2"), bench.keys("cache.memory=64"))


def age(bench):
    """the ranks of experts left alone"""
    assert not torch.equal(bench.keys("cache.age=0"), bench.keys("cache.age=2"))


def pinned_by(bench):
    """which experts are pinned"""
    for counts, pinned in (([0, 0, 5, 5, 0, 0, 0, 0], [2, 3]), ([0, 1, 0, 0, 0, 0, 0, 1], [1, 7])):
        pool = bench.pool("cache.slots=6", f"cache.profile={bench.profile(counts)}")
        expected = [8 * layer + expert for layer in range(3) for expert in pinned]
        assert pool.policy.pinned.nonzero().flatten().tolist() == expected


def decay(bench):
    """the ranks of the experts"""
    assert not torch.equal(bench.keys("cache.decay=0"), bench.keys("cache.decay=0.5"))


def prefill_tokens(bench):
    """the ranks of the experts, and what a prompt leaves in the slots"""
    if bench.choice == "cache=belady":  # no live run has it
        promoted = [bench.pool(f"cache.prefill_tokens={n}").policy.promoted(8, 0) for n in (0, 3)]
        assert promoted == [0, 3]
        return
    if bench.choice != "cache=static":  # whose ranks are given
        ranks = [bench.keys(f"cache.prefill_tokens={n}")[:-1].argsort() for n in ("all", 3)]
        assert not torch.equal(*ranks)
    few = (bench.choice, *bench.required, "cache.slots=12", "prefill=demand")
    for last, resident in ((0, False), (1, True)):
        with tiny_engine(bench.checkpoint, *few, f"cache.prefill_tokens={last}") as engine:
            engine.generate(PROMPT, max_new_tokens=1)
            assert bool((engine.runtime.pool.slot_of >= 0).any()) is resident


def warm_start(bench):
    """the slots and the ranks that a run begins with"""
    file = bench.checkpoint.parent / f"{bench.choice}.safetensors"
    if bench.choice == "cache=belady":  # no live run has it, and a replay begins empty
        with pytest.raises(ConfigError, match="begins with empty slots"):
            ask(["trace=x", bench.choice, f"cache.warm_start={file}"])
        return
    few = (bench.choice, *bench.required, "cache.slots=5")
    with tiny_engine(bench.checkpoint, *few) as engine:
        assert not (engine.runtime.pool.slot_of >= 0).any()
        engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        held, keys = engine.runtime.pool.id_of.clone(), engine.policies.cache.keys.clone()
        assert (held != SPACE.sink).any()
        engine.save_state(file)
    with tiny_engine(bench.checkpoint, *few, f"cache.warm_start='{file}'") as engine:
        assert torch.equal(engine.runtime.pool.id_of, held)
        assert torch.equal(engine.policies.cache.keys, keys)


def prefill_weight(bench):
    """the ranks of the experts"""
    ranks = [bench.keys(f"cache.prefill_weight={w}")[:-1].argsort() for w in (1.0, 0.01)]
    assert not torch.equal(*ranks)


def chunk_tokens(bench):
    """lookups, of which each chunk has its own"""
    one, many = (bench.prefill(f"prefill.chunk_tokens={n}") for n in (20, 1))
    assert many["lookups"] > one["lookups"]


def groups(bench):
    """plan.group_size"""
    assert bench.plan("prefill.groups=2").group_size == 4
    assert bench.plan("prefill.groups=8").group_size == 1


def ring(bench):
    """plan.staging_rows"""
    assert bench.plan("prefill.groups=2", "prefill.ring=2").staging_rows == 8
    assert bench.plan("prefill.groups=2", "prefill.ring=3").staging_rows == 12


def max_tokens(bench):
    """what crosses the link: whole layers, or only the experts that are missing"""
    streamed = bench.prefill("prefill.max_tokens=19")
    demanded = bench.prefill("prefill.max_tokens=20")
    assert streamed["stream"] and not streamed["fetch"]
    assert demanded["fetch"] and not demanded["stream"]


def otherwise(bench):
    """whether residents are copied on the device"""
    long = "prefill.max_tokens=1"
    warm = bench.prefill(long, "prefill.otherwise=hit_d2d", "prefill.chunk_tokens=10")
    cold = bench.prefill(long, "prefill.otherwise=always_stream", "prefill.chunk_tokens=10")
    assert warm["stream"] == warm["d2d"] == 0 or warm["stream"] + warm["d2d"] == cold["stream"]
    assert not cold["d2d"]


def decoded(bench, *overrides):
    """Decode's counters, layer by layer, of a run with few slots under a doctored clock."""
    few = (bench.choice, "cache.slots=4", "prefill=always_stream", *overrides)
    with tiny_engine(bench.checkpoint, *few) as engine:
        observe = engine.runtime.quotas.observe
        engine.runtime.quotas.observe = lambda step: observe(doctored(step))
        engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        return [row for row in engine.runtime.counters.rows() if row.phase == "decode"]


def doctored(step):
    """Both sides take a second for an expert."""
    return step._replace(fetch_s=step.fetched * 1.0, host_s=step.computed * 1.0)


def most_ahead(bench):
    """experts fetched ahead"""
    one, many = (bench.ahead(f"prefill.most_ahead={n}") for n in (1, 4))
    assert 0 < one < many


def profile(bench):
    """where measured costs are kept"""
    file = bench.checkpoint.parent / "costs.json"
    bench.plan(f"prefill.profile={file}")
    assert not file.exists()  # nothing ran
    bench.prefill(f"prefill.profile={file}")
    assert file.exists()


def cpu_layers(bench):
    """in which layers the host computes everything"""
    for asked, layers in (("[1]", {1}), ("2", {0, 1}), ("0.34", {0})):
        rows = decoded(bench, f"decode.cpu_layers={asked}")
        assert {row.layer for row in rows if row.fetched == row.hits == 0} == layers


def max_fetch(bench):
    """how much is fetched"""
    free, capped = (decoded(bench, f"decode.max_fetch={share}") for share in (1.0, 0.3))
    assert sum(row.computed for row in capped) > sum(row.computed for row in free)


def max_host(bench):
    """how much the host computes; below one half, nothing of two misses"""
    free, capped = (decoded(bench, f"decode.max_host={share}") for share in (1.0, 0.4))
    assert sum(row.computed for row in free) > sum(row.computed for row in capped) == 0


def warmup(bench):
    """how long all is fetched before anything is computed"""
    short, long = (decoded(bench, f"decode.warmup={steps}") for steps in (1, 1000))
    assert sum(row.computed for row in short) > sum(row.computed for row in long) == 0


def threads(bench):
    """torch.get_num_threads"""
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            bench.compose(f"device.threads={count}").device.open()
            assert torch.get_num_threads() == count
        bench.compose("device.threads=0").device.open()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def index(bench):
    """the torch device"""
    for i in range(2):
        assert bench.compose(f"device.index={i}").device.resolve() == torch.device("cuda", i)


def load(bench, options):
    """The tiny checkpoint as an engine would load it under a device's options."""
    model = compose(["model=folder", f"model.path={bench.checkpoint}"]).model
    weights, cpu = model.weights(), torch.device("cpu")
    return Loaded(model.architecture, weights, cpu, progress=None, **options)


def kernels(bench):
    """whether the kernels' view of an expert is looked for"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaded, "_kernel_shape", lambda loaded: "a shape")
        for on in (True, False):
            options = bench.compose(f"device.kernels={on}").device.engine_options()
            assert (load(bench, options).shape == "a shape") is on


def allow_pageable(bench):
    """whether banks that cannot be pinned are refused"""
    for on in (True, False):
        options = bench.compose(f"device.allow_pageable={on}").device.engine_options()
        loaded = load(bench, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded, "device", torch.device("cuda"))
            patch.setattr("residency.runtime.loaded.Pinned", refuse_to_pin)
            if on:
                assert loaded._pin(options["allow_pageable"], None) is None
                assert "pageable" in loaded.notes[-1]
            else:
                with pytest.raises(CapacityError):
                    loaded._pin(options["allow_pageable"], None)


def refuse_to_pin(*_):
    raise CapacityError("no locked memory")


def path(bench):
    """the folder"""
    assert bench.compose(f"model.path={bench.checkpoint}").model.folder == bench.checkpoint
    assert bench.compose("model.path=/other").model.folder != bench.checkpoint


def dtype(bench):
    """the dtype of the loaded model and of its rows"""
    if bench.is_made_up:
        for name in ("float32", "float16"):
            architecture = bench.compose(f"model.dtype={name}").model.architecture
            assert architecture.dtype == getattr(torch, name)
        return
    for name in ("float32", "bfloat16"):
        with build_engine(bench.compose("device=cpu", f"model.dtype={name}")) as engine:
            assert engine.model.dtype == getattr(torch, name)
            (views,) = {view.dtype for view in engine.runtime.banks.weights(0).values()}
            assert views == getattr(torch, name)


def context(bench):
    """which prompts are refused"""
    if bench.is_made_up:
        assert bench.compose("model.context=77").model.context == 77
        return
    fits, short = (["device=cpu", f"model.context={n}"] for n in (len(PROMPT) + 1, len(PROMPT)))
    with build_engine(bench.compose(*fits)) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
    with build_engine(bench.compose(*short)) as engine, pytest.raises(WorkloadError):
        engine.generate(PROMPT, max_new_tokens=1)


def layers(bench):
    """the number of layers"""
    for count in (2, 3):
        assert bench.compose(f"model.layers={count}").model.architecture.space.num_layers == count


def table_rows(bench):
    """the rows that a host table keeps"""
    for count in (50, 60):
        (table,) = bench.compose(f"model.table_rows={count}").model.architecture.tables
        assert table.num_rows == count


def form(bench):
    """how the experts are stored"""
    for name in ("bf16", "mxfp4"):
        architecture = bench.compose(f"model.format={name}").model.architecture
        assert architecture.layout.format.name == name


def routing(bench):
    """who routes"""
    few = ("model.layers=2",) if bench.is_made_up else ()
    cpu = torch.device("cpu")
    assert bench.compose("model.routing=model", *few).model.routing(cpu) is None
    even, skewed = (
        bench.compose(f"model.routing={name}", *few).model.routing(cpu).table_NLK
        for name in ("even", "skewed")
    )
    assert not torch.equal(even, skewed)
    if not bench.is_made_up:
        with build_engine(bench.compose("device=cpu", "model.routing=even")) as engine:
            assert torch.equal(engine.runtime.routing.table_NLK, even)


def prompt(bench):
    """the number of the prompt's tokens"""
    short, long = (bench.report(f"workload.prompt={text}") for text in ("ROMEO", "ROMEOROMEO"))
    assert short.prompt_tokens < long.prompt_tokens


def prompts(bench):
    """the number of texts"""
    config = bench.compose("workload.prompts=[RO,MEO]", f"workload.max_new_tokens={NUM_NEW}")
    with build_engine(config) as engine:
        report = config.workload.run(engine)
    assert [one.prompt_tokens > 0 for one in report.sequences] == [True, True]
    assert bench.compose("workload.prompts=[RO]").workload.prompts == ["RO"]


def max_new_tokens(bench):
    """the number of tokens"""
    for count in (1, 4):
        assert len(bench.tokens(f"workload.max_new_tokens={count}")) == count


def temperature(bench):
    """tokens"""
    assert bench.tokens("workload.temperature=0") != bench.tokens("workload.temperature=9")


def top_p(bench):
    """tokens"""
    hot = "workload.temperature=9"
    assert bench.tokens(hot) != bench.tokens(hot, "workload.top_p=0.001")


def seed(bench):
    """tokens drawn, made-up routes, random prompts"""
    if bench.is_made_up:
        assert not torch.equal(*(made_up_routes(bench, n) for n in (1, 2)))
        assert torch.equal(*(made_up_routes(bench, n) for n in (1, 1)))
        return
    if bench.choice in ("workload=bench", "workload=prefill_modes"):
        first, again, other = (bench.asked(f"workload.seed={n}") for n in (1, 1, 2))
        assert first == again != other
        return
    first, again, other = (
        bench.tokens("workload.temperature=9", f"workload.seed={n}") for n in (1, 1, 2)
    )
    assert first == again != other


def made_up_routes(bench, seed):
    few = ("model.layers=2", "model.routing=even", f"model.seed={seed}")
    return bench.compose(*few).model.routing(torch.device("cpu")).table_NLK


def lengths(bench):
    """the prompts that are timed"""
    asked = bench.asked("workload.lengths=[9,5]")
    assert [len(prompt) for (prompt,), new in asked if new == 1] == [5, 9]


def decode_tokens(bench):
    """the tokens asked for"""
    for count in (2, 5):
        (new,) = {new for _, new in bench.asked(f"workload.decode_tokens={count}") if new != 1}
        assert new == count + 1


def decode_context(bench):
    """the prompt before a decode"""
    for count in (3, 6):
        asked = bench.asked(f"workload.decode_context={count}")
        assert {len(prompt) for (prompt,), new in asked if new != 1} == {count}


def batch(bench):
    """the prompts that are decoded together"""
    for count in (1, 3):
        asked = bench.asked(f"workload.batch={count}")
        assert {len(prompts) for prompts, new in asked if new != 1} == {count}
        assert {len(prompts) for prompts, new in asked if new == 1} == {1}


def runs(bench, override):
    """How many generations there are."""
    if bench.choice == "workload=conversation":
        return bench.conversed(override)[1]
    return len(bench.asked(override))


def repeats(bench):
    """how often each is run"""
    once, twice, thrice = (runs(bench, f"workload.repeats={n}") for n in (1, 2, 3))
    assert thrice - twice == twice - once > 0


def warmups(bench):
    """how often each is run, untimed"""
    none, once, twice = (runs(bench, f"workload.warmups={n}") for n in (0, 1, 2))
    assert twice - once == once - none > 0


def pool(bench):
    """whether a prompt finds experts in the slots: warm, a decode runs before each"""
    cold, warm = (bench.asked(f"workload.pool={name}") for name in ("cold", "warm"))
    assert len(warm) == len(cold) + 1


def chunks(bench, override):
    """How many chunks are timed."""
    return len([new for _, new in bench.asked(override) if new == 1])


def modes(bench):
    """what takes turns"""
    if bench.choice == "workload=conversation":
        report, _ = bench.conversed("workload.modes=[always_stream,in_place]")
        assert report.labels == ["demand", "always_stream", "in_place"]
        return
    chosen_modes(bench)


def chosen_modes(bench):
    """the modes that take turns"""
    two = "workload.modes=[always_stream,'demand max_tokens=2']"
    assert chunks(bench, two) == 2 * chunks(bench, "workload.modes=[always_stream]")


def pools(bench):
    """the pools that each chunk is timed in"""
    assert chunks(bench, "workload.pools=[cold,warm]") == 2 * chunks(bench, "workload.pools=[warm]")


def prefix(bench):
    """the tokens before the chunk, the last of them decoded"""
    for length in (5, 9):
        asked = bench.asked(f"workload.prefix=[{length}]")
        assert {len(prompt) + new - 1 for (prompt,), new in asked if new != 1} == {length}


def crossing(bench):
    """the lines that are compared"""
    few = ("lengths=[4]", "repeats=1", "warmups=0", "decode_tokens=2", "pools=[cold]")
    short = [f"workload.{key}" for key in (*few, "modes=[demand,always_stream]")]
    with tiny_engine(bench.checkpoint, "cache.slots=all") as engine:
        for pair in ((), ("demand", "always_stream")):
            workload = bench.compose(*short, f"workload.crossing={list(pair)}").workload
            assert workload.run(engine).panels[0].crossing == pair


def stop_tokens(bench):
    """where the text ends"""
    tokens = bench.tokens("workload.temperature=0")
    stopped = bench.report("workload.temperature=0", f"workload.stop_tokens=[{tokens[3]}]")
    assert stopped.finish == "stop"
    assert stopped.token_ids == tokens[: tokens.index(tokens[3])]


def ignore_eos(bench):
    """whether the model's own end of text ends it"""
    tokens = bench.tokens("workload.temperature=0")
    generation = bench.demo.model.generation_config
    before, generation.eos_token_id = generation.eos_token_id, tokens[3]
    try:
        for ignored, finish in (("true", "length"), ("false", "stop")):
            report = bench.report("workload.temperature=0", f"workload.ignore_eos={ignored}")
            assert report.finish == finish
    finally:
        generation.eos_token_id = before


def allow_custom(bench):
    """whether a class from anywhere may be built"""
    own = f"cache._target_={OwnPolicy.__module__}.OwnPolicy"
    with pytest.raises(ConfigError, match="allow_custom=true"):
        bench.compose(own)
    assert type(bench.compose(own, "allow_custom=true").policies.cache) is OwnPolicy


def verify_banks(bench):
    """whether a changed bank is noticed"""
    for asked, raised in (("true", pytest.raises(DeviceError)), ("false", nullcontext())):
        with tiny_engine(bench.checkpoint, f"debug.verify_banks={asked}") as engine:
            engine.banks.layers[0][0, 0] ^= 1
            with raised:
                engine.generate(PROMPT, max_new_tokens=1)


class OwnPolicy(Lru):
    """Of no installed package."""


def profile_steps(bench):
    """whether a trace is there to write"""
    for asked, files in (("false", set()), ("true", {"trace.json"})):
        with tiny_engine(bench.checkpoint, "cache.slots=5", f"profile={asked}") as engine:
            engine.generate(PROMPT, max_new_tokens=2)
            assert set(engine.runtime.profile.files()) == files


def talk_path(bench):
    """whose sessions are measured"""
    file = bench.checkpoint.parent / "talk.jsonl"
    file.write_text('{"id": "mine", "messages": [{"role": "user", "content": "hello"}]}')
    (row,) = bench.conversed(f"workload.path={file}")[0].rows
    assert row.line.session == "mine" != read_sessions("")[0].name


def sessions(bench):
    """how many are measured"""
    for count in (1, 2):
        report, _ = bench.conversed(f"workload.sessions={count}")
        assert len({row.line.session for row in report.rows}) == count


def max_turns(bench):
    """the turns of each session"""
    for count in (1, 2):
        report, _ = bench.conversed(f"workload.max_turns={count}")
        assert [row.line.turn for row in report.rows] == list(range(1, count + 1))


def replies(bench):
    """the answers"""
    recorded = read_sessions("")[0].exchanges[0].assistant
    said = bench.compose("workload.max_new_tokens=4", "workload.max_turns=1").workload.said
    template = ChatTemplate(bench.demo.tokenizer)
    ((line,),) = said.scripts(bench.demo, template, read_sessions("")[:1])
    assert recorded.startswith(bench.demo.tokenizer.decode(line.answer))
    assert line.answer != bench.tokens("workload.max_new_tokens=4")


def overflow(bench):
    """what becomes of a turn for which there is no room"""
    keys = ("model.context=60", "workload.max_new_tokens=20")
    for rule in ("refuse", "drop_oldest"):
        override = f"workload.overflow={rule}"
        if bench.choice == "workload=conversation":
            talk = lambda: bench.conversed(*keys, "workload.max_turns=2", override)  # noqa: B023, E731
        else:
            talk = lambda: said_twice(bench.compose(*keys, "device=cpu", override))  # noqa: B023, E731
        if rule == "refuse":
            with pytest.raises(WorkloadError, match="turn 2"):
                talk()
        else:
            talk()


def said_twice(config):
    with build_engine(config) as engine:
        dialogue = config.workload.run(engine)
        for _ in range(2):
            dialogue.say("word " * 12)


def snapshots(bench):
    """what a recurrent model's memory plan has for them"""
    folder = bench.checkpoint.parent / "recurrent"
    if not folder.exists():
        architectures.write(folder, "qwen3_next")
    model = ("model=folder", f"model.path={folder}", "device=cpu")
    planned = []
    for count in (3, 6):
        with build_engine(bench.compose(*model, f"workload.snapshots={count}")) as engine:
            planned.append(engine.runtime.plan.snapshot_bytes)
    assert planned[1] == 2 * planned[0] > 0


ROWS = {
    "profile": profile_steps,
    "allow_custom": allow_custom,
    "workload.path": talk_path,
    "workload.sessions": sessions,
    "workload.max_turns": max_turns,
    "workload.replies": replies,
    "workload.overflow": overflow,
    "workload.snapshots": snapshots,
    "debug.verify_banks": verify_banks,
    "model.layers": layers,
    "model.format": form,
    "model.routing": routing,
    "model.table_rows": table_rows,
    "model.seed": seed,
    "workload.lengths": lengths,
    "workload.decode_tokens": decode_tokens,
    "workload.decode_context": decode_context,
    "workload.repeats": repeats,
    "workload.warmups": warmups,
    "workload.pool": pool,
    "workload.pools": pools,
    "workload.modes": modes,
    "workload.prefix": prefix,
    "workload.crossing": crossing,
    "model.path": path,
    "model.dtype": dtype,
    "model.context": context,
    "cache.slots": slots,
    "cache.scope": scope,
    "cache.admit_prefill": admit_prefill,
    "cache.admit_decode": admit_decode,
    "cache.prefill_tokens": prefill_tokens,
    "cache.decay": decay,
    "cache.history": history,
    "cache.prefill_weight": prefill_weight,
    "cache.warm_start": warm_start,
    "cache.half_life": half_life,
    "cache.follow": follow,
    "cache.memory": memory,
    "cache.age": age,
    "cache.profile": pinned_by,
    "prefill.chunk_tokens": chunk_tokens,
    "prefill.groups": groups,
    "prefill.ring": ring,
    "prefill.max_tokens": max_tokens,
    "prefill.otherwise": otherwise,
    "prefill.most_ahead": most_ahead,
    "prefill.profile": profile,
    "decode.cpu_layers": cpu_layers,
    "decode.max_fetch": max_fetch,
    "decode.max_host": max_host,
    "decode.warmup": warmup,
    "device.threads": threads,
    "device.index": index,
    "device.kernels": kernels,
    "device.allow_pageable": allow_pageable,
    "workload.prompt": prompt,
    "workload.prompts": prompts,
    "workload.batch": batch,
    "workload.max_new_tokens": max_new_tokens,
    "workload.temperature": temperature,
    "workload.top_p": top_p,
    "workload.seed": seed,
    "workload.stop_tokens": stop_tokens,
    "workload.ignore_eos": ignore_eos,
}

# Keys that the base class answers for are tried with a few policies, not with each.
SHARED = set(option_node("cache", "lru")) - {"slots"}
FEW = ("lru", "lrfu", "static")

KEYS = [
    (f"{group}={name}", f"{group}.{key}")
    for group in GROUPS
    for name in option_names(group)
    for key in option_node(group, name)
    if key != "_target_" and not (group == "cache" and key in SHARED and name not in FEW)
]
KEYS += [("cache=lru", key) for key in root_leaves()]


def test_every_key_has_a_row_and_every_row_a_key():
    assert {key for _, key in KEYS} == set(ROWS)


@pytest.mark.parametrize(("choice", "key"), KEYS)
def test_the_key_changes_what_its_row_says(checkpoint, demo, choice, key):
    ROWS[key](Bench(checkpoint, demo, choice))
