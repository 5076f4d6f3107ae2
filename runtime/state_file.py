"""State files: what the slots held and the cache policy knew, for a run that starts warm.

Safetensors: `slots` int32 [num_slots] (the expert in each, the sink id in an empty one), `clock`
int64 [1] (the index of the last token seen), and the policy's tensors as `policy.NAME`, of one row
for each id and the sink's. The header's metadata says of what policy, config and model. Experts'
bytes are not kept: they are read from the banks again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from residency.policies.base import Conflict
from residency.policies.cache import CachePolicy
from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace
from residency.runtime.offload import OffloadRuntime
from residency.runtime.results import require_writable, write_whole
from residency.runtime.slot_state import seat

FORMAT, VERSION = "residency-state", 1
KEY, OPTION = "cache.warm_start", "--save-state"
LATEST = 1 << 48  # tokens, of any clock that was ever read
SLOTS, CLOCK, POLICY = "slots", "clock", "policy."
# Keys that may differ from those that the state was saved under: they change no tensor's meaning.
FREE = frozenset({"slots", "admit_prefill", "admit_decode", "prefill_tokens", "warm_start"})


def keeps_state(policy: CachePolicy) -> bool:
    """Whether there is anything to save; a policy without slots has nothing."""
    return hasattr(policy.config, "warm_start")


def require_state(policy: CachePolicy, file: Path) -> None:
    """Before a run: raises ConfigError for nothing to save, OutputError for a file that cannot be
    written.
    """
    if not keeps_state(policy):
        raise ConfigError(f"{OPTION} {file}: cache={policy.name} has no slots and no history")
    require_writable(file, OPTION)


def save_state(runtime: OffloadRuntime, file: Path) -> None:
    """Write the whole file or nothing. Raises as `require_state`, and for a full disk."""
    pool = runtime.pool
    require_state(pool.policy, file)
    tensors = {SLOTS: pool.id_of, CLOCK: runtime.clock.reshape(1)}
    tensors |= {f"{POLICY}{name}": tensor for name, tensor in pool.policy.state().items()}
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    head = {
        "format": FORMAT,
        "version": str(VERSION),
        "policy": pool.policy.name,
        "config": json.dumps(asdict(pool.policy.config)),
        "model": json.dumps(asdict(pool.space)),
    }
    write_whole({file: save(whole, head)}, OPTION)


def state_faults(policy: CachePolicy, space: IdSpace) -> Iterator[Conflict]:
    """Why the file that the config names cannot be begun with; from its header alone."""
    if not (keeps_state(policy) and policy.config.warm_start):
        return
    try:
        SavedState.read(policy, space)
    except ConfigError as error:
        key, _, reason = str(error).partition(": ")
        yield Conflict((key,), reason, f"{KEY}=FILE, written by residency run {OPTION} FILE")


def warm_start(runtime: OffloadRuntime) -> None:
    """Begin with the file that the cache's config names, if any; the runtime's notes tell of it.

    The history comes back whole, and of the experts as many as fit: see `seat`. Raises ConfigError.
    """
    pool, policy, sink = runtime.pool, runtime.pool.policy, runtime.pool.space.sink
    if not (keeps_state(policy) and policy.config.warm_start):
        return
    start = time.perf_counter()
    saved = SavedState.read(policy, pool.space)
    wanted = saved.slots.to(pool.device)
    num_held = seat(runtime, wanted, saved.policy)
    runtime.clock.fill_(saved.clock)
    runtime.tokens_seen = saved.clock + 1
    seconds, num_bytes = time.perf_counter() - start, num_held * runtime.rows.shape[1]
    num_saved = int((wanted != sink).sum())
    runtime.begun_with = [
        f"warm start: {num_held:,} of {num_saved:,} saved experts are in slots, {num_bytes:,} "
        f"bytes in {seconds:.3f} s, which no other figure counts"
    ]


@dataclass(frozen=True)
class SavedState:
    """slots: int32 [num_slots] as saved. policy: its tensors by name. All on the CPU."""

    slots: torch.Tensor
    clock: int
    policy: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, policy: CachePolicy, space: IdSpace) -> SavedState:
        """Raises ConfigError for a file that is none, or of another policy, config or model."""
        file = Path(policy.config.warm_start).expanduser()
        try:
            with safe_open(file, framework="pt") as opened:
                _check_head(opened.metadata() or {}, policy, space)
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except ConfigError as error:
            raise ConfigError(f"{KEY}={policy.config.warm_start}: {error}") from None
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{KEY}={policy.config.warm_start}: its header is damaged") from error
        except (OSError, SafetensorError) as error:
            reason = f"cannot be read ({str(error).splitlines()[0]})"
            raise ConfigError(f"{KEY}={policy.config.warm_start}: {reason}") from error
        own = {n.removeprefix(POLICY): t for n, t in tensors.items() if n.startswith(POLICY)}
        slots, clock = tensors.get(SLOTS), tensors.get(CLOCK)
        rows = space.num_ids + 1
        whole = all(t.shape[:1] == (rows,) for t in own.values())
        if slots is None or clock is None or not (whole and _are_slots(slots, space)):
            raise ConfigError(f"{KEY}={policy.config.warm_start}: its tensors are not a state's")
        if clock.dtype is not torch.int64 or clock.shape != (1,) or not -1 <= int(clock) < LATEST:
            raise ConfigError(f"{KEY}={policy.config.warm_start}: its clock is none")
        return cls(slots, int(clock), own)


def _are_slots(slots: torch.Tensor, space: IdSpace) -> bool:
    """Whether they name experts there are, each once, or nobody."""
    if slots.dtype is not torch.int32 or slots.ndim != 1:
        return False
    held = slots[slots != space.sink]
    return bool(((held >= 0) & (held < space.sink)).all()) and len(held.unique()) == len(held)


def _check_head(head: Mapping[str, str], policy: CachePolicy, space: IdSpace) -> None:
    """Raises ConfigError without naming the file."""
    if (head.get("format"), head.get("version")) != (FORMAT, str(VERSION)):
        said = f"{head.get('format', 'none')} {head.get('version', '')}".strip()
        raise ConfigError(f"its format is {said}, not {FORMAT} {VERSION}")
    model: dict[str, int] = json.loads(head["model"])
    if model != asdict(space):
        raise ConfigError(
            f"it is of a model of {_shape(model)}, and this has {_shape(asdict(space))}"
        )
    if head["policy"] != policy.name:
        raise ConfigError(f"it was saved by cache={head['policy']}, and this is {policy.name}")
    saved: dict[str, Any] = json.loads(head["config"])
    for key, value in asdict(policy.config).items():
        if key not in FREE and saved.get(key, value) != value:
            raise ConfigError(f"it was saved with cache.{key}={saved[key]}, and this is {value}")


def _shape(model: Mapping[str, int]) -> str:
    return "{num_layers} layers x {num_experts} experts, top-{top_k}".format(**model)
