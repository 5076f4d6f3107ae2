"""What a checkpoint, a trace or a config may not do: run code, or write outside of its folder."""

import ast
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from command import assert_refused, residency
from conftest import write_checkpoint

from residency.policies.errors import ConfigError, OutputError
from residency.runtime.cost_profile import profile_path, write_profile
from residency.runtime.results import ResultFolder, write_whole
from residency.runtime.traces.importing import import_trace
from residency.runtime.traces.reading import read

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    *("cli.py", "commands", "sweeps", "reports"),
    *("conf", "policies", "runtime", "testing"),
)
MODULES = sorted(
    file
    for name in SHIPPED
    for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
)
PICKLES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
RUNS = {"eval", "exec", "compile", "__import__"}


def name_of(file):
    return str(file.relative_to(ROOT))


def unsafe(tree):
    """Every place that could run what a file holds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PICKLES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            if [alias.name for alias in node.names] != ["UnpicklingError"]:  # an error is no loader
                yield node.lineno, f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _unsafe_call(node))


def _unsafe_call(node):
    called = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called == "torch.load" and not _is(keywords.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if called.endswith(("np.load", "numpy.load")) and not _is(keywords.get("allow_pickle"), False):
        yield f"{called} without allow_pickle=False"
    if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], False):
        yield "trust_remote_code"
    if called in RUNS or called in ("yaml.load", "yaml.unsafe_load", "os.system", "os.popen"):
        yield called
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield "a shell"


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_no_module_runs_what_a_file_holds(file):
    assert list(unsafe(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "torch.load(f)", "np.load(f)", "eval(x)"),
        *("torch.load(f, weights_only=safe)", "np.load(f, allow_pickle=True)", "exec(x)"),
        *("AutoConfig.from_pretrained(f, trust_remote_code=True)", "yaml.load(f)"),
        *("subprocess.run(x, shell=True)", "import joblib.numpy_pickle as j"),
    ],
)
def test_the_scan_finds(text):
    assert len(list(unsafe(ast.parse(text)))) == 1


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


@pytest.fixture
def went_off(tmp_path):
    """A file that shows that foreign code has run."""
    file = tmp_path / "went off"
    yield file
    assert not file.exists()


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "x")))
    assert (tmp_path / "x").exists()


# Checkpoints.


def test_a_checkpoint_of_pickles_is_refused(tmp_path, went_off):
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"model.norm.weight": Bomb(went_off)}, folder / "pytorch_model.bin")
    result = residency("run", "x", "model=folder", f"model.path='{folder}'", "device=cpu")
    assert_refused(result, folder, "only safetensors checkpoints are read")


def test_code_that_comes_with_a_checkpoint_never_runs(tmp_path, went_off):
    """It runs as if the code were not there, or is refused; its model type is transformers'."""
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe")
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(went_off)!r}).touch()\nclass Own: pass\n"
        )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
    }
    tokenizer = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    words = ("run", "x", "model=folder", f"model.path='{folder}'", "device=cpu")
    for model_type in ("qwen3_moe", "nobody_knows"):
        config["model_type"] = model_type
        (folder / "config.json").write_text(json.dumps(config))
        assert_refused(residency(*words), folder)
    assert "custom_code" not in os.environ.get("HF_HOME", "")


# Traces.


def test_a_trace_of_pickles_is_refused(tmp_path, went_off):
    torch.save({"records": [Bomb(went_off)]}, tmp_path / "of_torch.pt")
    np.save(tmp_path / "of_numpy.npy", np.array([Bomb(went_off)]), allow_pickle=True)
    np.savez(tmp_path / "zipped.npz", expert_ids=np.array([Bomb(went_off)]))
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Bomb(went_off)))
    for name in ("of_torch.pt", "of_numpy.npy", "zipped.npz", "bare.pt"):
        with pytest.raises(ConfigError):
            import_trace(str(tmp_path / name))
    with pytest.raises(ConfigError):
        read(tmp_path / "zipped.npz")


def zip_bomb(file, size):
    """An .npz of a few KB whose array says, and has, `size` bytes of nothing."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        content, {"descr": "|u1", "fortran_order": False, "shape": (size, 1, 1)}
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("expert_ids.npy", content.getvalue() + bytes(size))


def test_an_archive_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "routes.npz"
    zip_bomb(file, 64 << 20)
    assert file.stat().st_size < 100_000
    monkeypatch.setattr("residency.runtime.traces.archive.free_host_bytes", lambda: 32 << 20)
    with pytest.raises(ConfigError, match=r"unpacks to .* of memory"):
        read(file)


# Outputs.


@pytest.mark.parametrize("name", ["../out.png", "/etc/x", "a/b", "..", ".", "", "a\0b"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    folder = ResultFolder(tmp_path / "out")
    with pytest.raises(OutputError, match="does not name a file in it"):
        folder.write({}, "", {name: b"x"})
    assert [file.name for file in tmp_path.rglob("*")] == ["out"]


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    target = tmp_path / "theirs"
    target.write_text("theirs")
    (tmp_path / "out").mkdir()
    for name in ("result.json", "config.yaml"):
        (tmp_path / "out" / name).symlink_to(target)
    ResultFolder(tmp_path / "out", force=True).write({"of": "mine"}, "x: 1")
    assert target.read_text() == "theirs"
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == {"of": "mine"}
    (tmp_path / "link").symlink_to(target)
    write_whole({tmp_path / "link": b"mine"}, "--routes")
    assert target.read_text() == "theirs" and not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["../../x", "GPU /etc/passwd", "a\0b", "NVIDIA H200\n..", "ü…/"])
def test_a_devices_name_does_not_lead_out_of_the_cache(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = profile_path(name, f"{name} 2x3")
    assert write_profile(path, {}) and path.parent == tmp_path / "residency" / "costs"
