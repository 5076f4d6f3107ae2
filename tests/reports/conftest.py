"""A sweep's folder with real runs of a tiny model in it, one failed and two not done."""

import json

import pytest
from command import residency
from conftest import tiny_engine

from residency.conf import compose
from residency.runtime.results import ResultFolder

BENCH = (
    *("workload.lengths=[4,9]", "workload.decode_tokens=3", "workload.decode_context=5"),
    *("workload.repeats=2", "workload.warmups=0", "device=cpu", "device.threads=1"),
)
CHOICES = [(cache, slots) for cache in ("lru", "lrfu") for slots in (8, 16)]
FAILURE = {
    "version": 1,
    "kind": "failure",
    "error": "device memory: too little <b>here</b>",
    "detail": "Traceback\n  a line",
}


def command(*args):
    result = residency(*args)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="session")
def sweep(checkpoint, tmp_path_factory):
    """Four benches, and as `runs/` beside them a run whose routes were recorded."""
    folder = tmp_path_factory.mktemp("report") / "sweep"
    (folder / "routes").mkdir(parents=True)
    routes = folder / "routes" / "0.safetensors"
    with tiny_engine(checkpoint, "cache=lru", "cache.slots=8") as engine:
        recorder = engine.record_routes()
        report = engine.generate(list(range(3, 12)), max_new_tokens=24, ignore_eos=True)
    recorder.save(routes)
    config = compose(["model=folder", f"model.path={checkpoint}", "cache=lru", "cache.slots=8"])
    ResultFolder(folder.parent / "runs" / "one").write(report.as_dict(), config.yaml())
    model = ("model=folder", f"model.path={checkpoint}")
    jobs = []
    for number, (cache, slots) in enumerate([*CHOICES, ("fifo", 8), ("lfu", 8), ("lfu", 16)]):
        own = [f"cache={cache}", f"cache.slots={slots}"]
        if number < len(CHOICES):
            command("bench", *model, *BENCH, *own, "--out", folder / str(number), "--json")
        jobs.append(
            {
                "number": number,
                "folder": str(number),
                "overrides": [*BENCH, *own],
                "title": " ".join(own),
                "group": 0,
                "routes": "routes/0.safetensors",
            }
        )
    for number, name, content in ((4, "failure.json", FAILURE), (5, "running.json", {})):
        (folder / str(number)).mkdir()
        (folder / str(number) / name).write_text(json.dumps(content))
    reason = {"keys": ["prefill=demand", "cache=none"], "reason": "no <slots>", "mend": "cache=lru"}
    whole = {
        "version": 1,
        "kind": "sweep",
        "overrides": ["cache=lru,lrfu,fifo,lfu", "cache.slots=8,16"],
        "jobs": jobs,
        "skipped": [{"overrides": ["cache=none"], "reasons": [reason]}],
        "duplicates": [{"overrides": ["cache=lru", "cache.slots=33%"], "same_as": 0}],
        "environment": {},
    }
    (folder / "sweep.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture(scope="session")
def made(sweep, tmp_path_factory):
    """The folder of its report."""
    out = tmp_path_factory.mktemp("made") / "report"
    command("report", sweep, "--out", out)
    return out
