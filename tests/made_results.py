"""Results by hand, in the form that the commands write, and folders of them."""

import json

ENVIRONMENT = {"device": "cpu", "device_name": "a machine", "cpus": "2", "residency": "1"}


def spread(values):
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "least": ordered[0], "most": ordered[-1]}


def entry(tokens, key, values, **more):
    runs = [{"seconds": value, "device_s": None} for value in values]
    return {"tokens": tokens, key: spread(values), "runs": runs, "floor": None} | more


def bench(prefill, decode, cache="lru", mode="demand", slots=4, **more):
    """prefill: of each length, the times of its runs. decode: the times of a token."""
    config = {
        "model": {"_target_": "residency.runtime.models.demo.Demo", "routing": "model"},
        "cache": {"_target_": f"residency.policies.cache.{cache}.X", "slots": slots},
        "prefill": {"_target_": f"residency.policies.prefill.{mode}.X"},
        "workload": {"_target_": "residency.runtime.workloads.bench.Bench", "pool": "cold"},
    }
    return {
        "version": 1,
        "kind": "bench",
        "title": f"cache={cache}",
        "plan": {"pool": "cold"},
        "prefill": [entry(tokens, "ttft_s", values) for tokens, values in prefill.items()],
        "decode": entry(8, "tpot_s", decode),
        "memory": {"num_slots": slots, "row_bytes": 10, "bank_bytes": 160},
        "environment": ENVIRONMENT,
        "notes": [],
        "config": config,
    } | more


def write(folder, result):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    return folder


def write_sweep(folder, jobs, **more):
    """jobs: of each, its title and the files in its folder by name, their content as JSON."""
    rows = []
    for number, (title, files) in enumerate(jobs):
        (folder / str(number)).mkdir(parents=True)
        for name, content in files.items():
            (folder / str(number) / name).write_text(json.dumps(content))
        row = {"number": number, "folder": str(number), "overrides": title.split(), "title": title}
        rows.append(row | {"group": 0, "routes": None})
    sweep = {"version": 1, "kind": "sweep", "overrides": [], "jobs": rows, "environment": {}}
    (folder / "sweep.json").write_text(json.dumps(sweep | more))
    return folder
