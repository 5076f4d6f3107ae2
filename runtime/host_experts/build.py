"""The native library: built by the system's C++ compiler when first needed, kept in a cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("experts.cpp", "vectors.h")
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300
_TUNE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


class BuildError(Exception):
    """Why there is no native library, in one line."""


def load(*flags: str) -> ctypes.CDLL:
    """The library for this CPU, with more flags for the compiler where given.

    Raises BuildError where it can be neither found in the cache nor built.
    """
    path = _built(_compiler(), flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: cannot be loaded: {error}") from error


def _compiler() -> list[str]:
    """The compiler's command: CXX where it is set, else the first there is."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"no C++ compiler: CXX names {chosen[0]}, which is not there")
        return chosen
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is there")
    return [found]


def _built(compiler: list[str], flags: tuple[str, ...]) -> Path:
    tune = [_TUNE[platform.machine()]] if platform.machine() in _TUNE else []
    command = [*compiler, "-std=c++20", "-O3", *tune, "-ffp-contract=fast", "-w"]
    command += ["-shared", "-fPIC", "-pthread", *flags]
    path = _cache() / f"host_experts-{_key(command)}.so"
    if not path.exists():
        _compile(command, path)
    return path


def _compile(command: list[str], path: Path) -> None:
    """Built beside `path`, then renamed: of two processes that build at once, either may win."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            full = [*command, str(FOLDER / SOURCES[0]), "-o", str(built)]
            done = subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode:
                raise BuildError(f"{command[0]} cannot build {SOURCES[0]}: {_why(done.stderr)}")
            os.replace(built, path)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_S} s") from error
    except OSError as error:
        raise BuildError(f"{path.parent}: cannot be written: {error.strerror}") from error


def _why(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["it gave no reason"]
    return next((line for line in lines if "error" in line), lines[-1]).strip()


def _cache() -> Path:
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"no cache folder: {error}; set XDG_CACHE_HOME") from error
    return Path(home) / "residency"


def _key(command: list[str]) -> str:
    """Of everything the library depends on: sources, command, compiler's version and CPU."""
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"no C++ compiler: {command[0]} cannot be run: {error}") from error
    digest = hashlib.sha256(version.stdout)
    for source in SOURCES:
        digest.update((FOLDER / source).read_bytes())
    digest.update("\0".join([*command, platform.machine(), *_cpu()]).encode())
    return digest.hexdigest()[:20]


def _cpu() -> list[str]:
    """The lines that say what the first CPU is and can do."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0] if info.exists() else platform.processor()
    named = ("model", "flags", "Features", "CPU part", "CPU implementer")
    return [line for line in first.splitlines() if line.startswith(named)]
