"""What keeps the code in shape: packages, directions of imports, sizes, one place per policy."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    *("cli.py", "commands", "reports", "sweeps"),
    *("conf", "policies", "runtime", "testing", "demo"),
)
MODULES = sorted(
    file
    for name in SHIPPED
    for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
)
MAX_LINES = 300
NOT_SHIPPED = {"demo/metrics.json"}  # evidence for the model's card
# What each part may import of residency; only listed parts may be imported.
ALLOWED = {
    "policies": {"policies"},
    "runtime": {"policies", "runtime"},
    "conf": {"policies", "runtime", "conf"},
    "reports": {"policies", "runtime", "conf", "reports"},
    "sweeps": {"policies", "runtime", "conf", "sweeps"},
    "commands": {"policies", "runtime", "conf", "reports", "sweeps", "commands"},
    "cli": {"policies", "runtime", "conf", "commands"},
    "testing": {"policies", "runtime", "testing"},
    "demo": set(),
}


def name_of(file):
    return str(file.relative_to(ROOT))


def imports(file):
    """Every module that `file` imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: relative import"
            yield node.module


@pytest.fixture(scope="module")
def setuptools():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_on_disk_is_shipped(setuptools):
    on_disk = {"residency"}
    for part in SHIPPED:
        for file in (ROOT / part).rglob("__init__.py"):
            on_disk.add(".".join(["residency", *file.parent.relative_to(ROOT).parts]))
    assert set(setuptools["packages"]) == on_disk
    assert len(setuptools["packages"]) == len(on_disk)


def test_every_folder_of_modules_is_a_package():
    for file in MODULES:
        assert file.parent == ROOT or (file.parent / "__init__.py").exists(), name_of(file)


def test_no_other_package_lies_beside_the_shipped_ones():
    beside = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert beside == {name for name in SHIPPED if not name.endswith(".py")}
    assert [file.name for file in ROOT.glob("*.py")] == ["cli.py"]


def test_every_data_file_is_shipped(setuptools):
    shipped = set()
    for package in setuptools["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        for key in (package, "*"):
            for pattern in setuptools["package-data"].get(key, []):
                shipped.update(folder.glob(pattern))
    data = {
        file
        for part in SHIPPED
        for file in (ROOT / part).rglob("*")
        if file.is_file() and file.suffix != ".py" and file.parent.name != "__pycache__"
    }
    assert {name_of(file) for file in data - shipped} == NOT_SHIPPED


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_imports_point_one_way(file):
    part = file.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports(file):
        top, _, rest = module.partition(".")
        assert top not in ALLOWED, f"import residency.{module} instead"
        if top == "residency":
            assert rest.partition(".")[0] in ALLOWED[part], f"{part} imports {module}"


@pytest.mark.parametrize("file", sorted((ROOT / "policies").rglob("*.py")), ids=name_of)
def test_policies_import_torch_and_numpy_alone(file):
    for module in imports(file):
        top = module.partition(".")[0]
        assert top in {"torch", "numpy", "residency"} or top in sys.stdlib_module_names, module


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_no_module_is_too_long(file):
    assert len(file.read_text().splitlines()) <= MAX_LINES


def test_a_policy_is_one_module_and_one_yaml():
    """Lrfu stands for all of them. A policy may do without a fused touch and a compiled form."""
    own = {"policies/cache/lrfu.py", "conf/cache/lrfu.yaml"}
    default = {"conf/config.yaml"}
    beside = [ROOT / "runtime/kernels", ROOT / "runtime/replay/compiled"]
    files = [*MODULES, *(ROOT / "conf").rglob("*.yaml")]
    mentions = {
        name_of(f)
        for f in files
        if "lrfu" in f.read_text().lower() and not any(map(f.is_relative_to, beside))
    }
    assert {name for name in mentions if not name.startswith(("cli.py", "commands/"))} == (
        own | default
    )
    assert set(imports(ROOT / "cli.py")).isdisjoint({"residency.policies.cache.lrfu"})


@pytest.mark.parametrize("group", ["cache", "prefill", "decode"])
def test_each_policy_has_a_module_and_a_yaml_of_one_name(group):
    modules = {f.stem for f in (ROOT / "policies" / group).glob("*.py")} - {"__init__", "base"}
    assert modules == {f.stem for f in (ROOT / "conf" / group).glob("*.yaml")}


def test_importing_the_cli_is_light():
    code = "import sys, residency.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.split())
    heavy = {"torch", "hydra", "omegaconf", "transformers", "numpy", "policies", "runtime", "conf"}
    assert "residency.cli" in loaded
    assert loaded.isdisjoint(heavy)
