"""`residency policies new`: a package with a policy of one's own, written whole or not at all."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from residency.conf.catalog import POLICY_GROUPS
from residency.conf.options import option_names
from residency.policies.errors import ConfigError, OutputError

TEMPLATES = "templates"
NAME = re.compile(r"[a-z][a-z0-9_]*")
# Words that `residency policies` takes for commands, and what the package has beside the policy.
TAKEN = frozenset({"new", "show", "conf", *POLICY_GROUPS})


@dataclass(frozen=True)
class Kind:
    """What a package of one group differs in. suffix: of the class's name."""

    what: str
    suffix: str
    contract: str
    attribute: str


KINDS = {
    "cache": Kind("cache policy", "Cache", "CachePolicyContract", "policy"),
    "prefill": Kind("prefill mode", "Prefill", "PrefillContract", "mode"),
    "decode": Kind("decode target", "Decode", "DecodeContract", "target"),
}


def write_package(name: str, group: str, folder: Path) -> list[Path]:
    """Write the package into `folder`, which is made; the files in it.

    Raises ConfigError for a name or a group that cannot be, OutputError for a folder.
    """
    _check(name, group)
    if folder.exists():
        raise OutputError(f"{folder}: is there already; choose another with --folder")
    texts = package_files(name, group)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        staged.chmod(0o755)
        for path, text in texts.items():
            file = staged / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        os.rename(staged, folder)
    except OSError as error:
        raise OutputError(f"{folder}: writing failed ({error.strerror})") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return [folder / path for path in texts]


def package_files(name: str, group: str) -> dict[str, str]:
    """The files' contents by their paths in the package's folder."""
    kind, package = KINDS[group], f"residency_{name}"
    values = {
        "name": name,
        "group": group,
        "package": package,
        "cls": "".join(part.capitalize() for part in name.split("_")) + kind.suffix,
        "what": kind.what,
        "contract": kind.contract,
        "attribute": kind.attribute,
    }
    return {
        "pyproject.toml": _filled("pyproject.toml", values),
        f"{package}/__init__.py": "",
        f"{package}/{name}.py": _filled(f"{group}.py", values),
        f"{package}/conf/__init__.py": "",
        f"{package}/conf/{group}/{name}.yaml": _filled(f"{group}.yaml", values),
        f"tests/test_{name}.py": _filled("test.py", values),
    }


def _check(name: str, group: str) -> None:
    if group not in KINDS:
        raise ConfigError(f"--kind {group}: it must be one of {', '.join(KINDS)}")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name}: it must be a Python name of lower-case letters, digits and _, for it becomes "
            "a module's"
        )
    if name in TAKEN:
        raise ConfigError(f"{name}: that word means something else here; choose another name")
    for other in POLICY_GROUPS:
        if name in option_names(other):
            raise ConfigError(f"{name}: there is {other}={name} already; choose another name")


def _filled(template: str, values: dict[str, str]) -> str:
    text = files("residency.conf").joinpath(TEMPLATES, f"{template}.in").read_text()
    return Template(text).substitute(values)
