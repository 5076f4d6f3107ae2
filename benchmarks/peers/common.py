"""What the peers' drivers share: prompts, model folders of fewer layers, and result.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LENGTHS = "16,64,256,512,1024,2048,4096"
PATHS = ("model", "out", "like")  # options that no result keeps


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options of drivers that measure prompts of given lengths."""
    found = base_parser(about)
    found.add_argument("--lengths", default=LENGTHS, help="prompt lengths, comma between")
    found.add_argument("--decode-tokens", type=int, default=64)
    found.add_argument("--decode-context", type=int, default=128)
    return found


def base_parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every driver has."""
    found = argparse.ArgumentParser(description=about)
    found.add_argument("model", type=Path, help="a folder with config.json and a tokenizer")
    found.add_argument("--out", type=Path, required=True, help="where result.json goes")
    found.add_argument("--layers", type=int, default=0, help="fewer layers; 0: the config's")
    found.add_argument("--repeats", type=int, default=3)
    found.add_argument("--warmups", type=int, default=1)
    found.add_argument("--seed", type=int, default=0)
    return found


@contextmanager
def model_folder(model: Path, layers: int, bfloat16: bool = False) -> Iterator[Path]:
    """The folder, with its config changed. bfloat16: drop its quantization."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / model.name
        shutil.copytree(model, folder)
        config = json.loads((model / "config.json").read_text())
        if layers:
            config["num_hidden_layers"] = layers
        if bfloat16:
            config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        yield folder


def prompt(length: int, draw: random.Random, vocabulary: int) -> list[int]:
    return [draw.randrange(2, vocabulary) for _ in range(length)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def phase(tokens: int, seconds: Sequence[float], **known: Any) -> dict[str, Any]:
    """One entry of `prefill`, or `decode`; what a peer does not tell is null."""
    rates = ("hit_rate", "miss_rate", "bytes", "link_bytes", "link_share", "counters")
    unknown = dict.fromkeys(rates)
    runs = [{"seconds": value, "device_s": None} for value in seconds]
    return {"tokens": tokens, **unknown, "floor": None, "runs": runs, **known}


def prefill(tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    known = {"ttft_s": spread(seconds), "ttft_device_s": None, "waits_for_router": None}
    return phase(tokens, seconds, **known)


def decode(tokens: int, seconds: Sequence[float], **known: Any) -> dict[str, Any]:
    """Steps of one sequence."""
    times = {
        "tpot_s": spread([value / tokens for value in seconds]),
        "tokens_per_s": spread([tokens / value for value in seconds]),
        "step_s": None,
    }
    return phase(tokens, seconds, batch=1, **times, **known)


def write(
    options: argparse.Namespace,
    title: str,
    packages: Sequence[str],
    kind: str = "bench",
    **parts: Any,
) -> None:
    """result.json under --out, whole or not at all."""
    named = vars(options).items()
    result = {
        "version": 1,
        "kind": kind,
        "title": title,
        "made_up_weights": True,
        "plan": {name: value for name, value in named if name not in PATHS},
        **parts,
        "limits": None,
        "load_s": None,
        "memory": None,
        "environment": environment(packages),
        "config": {"model": options.model.name},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    temporary = options.out / ".result.json"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, options.out / "result.json")


def environment(packages: Sequence[str]) -> dict[str, str]:
    gpu = torch.cuda.is_available()
    return {
        "device": "cuda" if gpu else "cpu",
        "device_name": torch.cuda.get_device_name() if gpu else platform.machine(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
    } | {name: _version(name) for name in ("torch", "transformers", *packages)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
