"""Checks of a workload's keys, as conflicts with their mends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from residency.policies.base import Conflict, Need
from residency.policies.errors import WorkloadError
from residency.policies.prefill import PrefillMode

SHARED = tuple(field.name for field in fields(PrefillMode.Config))  # by all modes of one staging


def length_faults(lengths: Sequence[int]) -> Iterator[Conflict]:
    """Of `workload.lengths`, prompt lengths in tokens."""
    if lengths and min(lengths) < 1:
        reason = "each length must be at least 1"
        yield Conflict(
            (f"workload.lengths={_shown(lengths)}",), reason, "workload.lengths=[64,512]"
        )
    else:
        yield from list_faults("workload.lengths", lengths, "[64,512]", "length")


def list_faults(key: str, values: Sequence[object], usual: str, what: str) -> Iterator[Conflict]:
    """Of a list with distinct values, at least one. what: one of them, in words."""
    if not values:
        yield Conflict((f"{key}=[]",), f"there must be at least one {what}", f"{key}={usual}")
    elif len(set(values)) < len(values):
        unique = ",".join(map(str, dict.fromkeys(values)))
        reason = f"a {what} is there twice; workload.repeats measures one several times"
        yield Conflict((f"{key}={_shown(values)}",), reason, f"{key}=[{unique}]")


def number_faults(config: object, least: Mapping[str, int]) -> Iterator[Conflict]:
    """Of whole numbers, by key, with the least value of each."""
    for name, bound in least.items():
        if (value := getattr(config, name)) < bound:
            reason = f"it must be at least {bound}"
            yield Conflict((f"workload.{name}={value}",), reason, f"workload.{name}={bound}")


def seed_faults(seed: int) -> Iterator[Conflict]:
    if not 0 <= seed < 1 << 63:
        reason = "it must be from 0 to 2^63 - 1"
        yield Conflict((f"workload.seed={seed}",), reason, "workload.seed=0")


def mode_labels(texts: Sequence[str]) -> list[str]:
    """The options' names; the whole texts where one option is there several times."""
    names = [text.partition(" ")[0] for text in texts]
    return [
        name if names.count(name) == 1 else text for name, text in zip(names, texts, strict=True)
    ]


def mode_needs(modes: Mapping[str, PrefillMode]) -> tuple[Need, ...]:
    """What measured modes need of the cache and of decode, each said once."""
    found: dict[str, Need] = {}
    for label, mode in modes.items():
        for need in mode.requirements():
            because = f"it measures prefill={label}: {need.because}"
            found.setdefault(need.capability, replace(need, because=because))
    return tuple(found.values())


def mode_faults(texts: Sequence[str], modes: Iterable[PrefillMode]) -> Iterator[Conflict]:
    """Of modes that take turns on one staging. texts: as `workload.modes` has them."""
    for text, mode in zip(texts, modes, strict=False):
        key = (f"workload.modes, {text}",)
        for fault in mode.faults():
            yield Conflict(key, f"{fault.keys[0]}: {fault.reason}", fault.mend)
        for name in (setting.partition("=")[0] for setting in text.split()[1:]):
            if name in SHARED:
                reason = f"all modes use one staging; {name} is the combination's own mode's"
                yield Conflict(key, reason, f"prefill.{name}=...")


def context_faults(lengths: Sequence[int], needed: int, context: int) -> Iterator[Conflict]:
    """Runs of these lengths that need more tokens than the context has."""
    if needed > context:
        reason = (
            f"the longest run needs a context of {needed} tokens and there is one of {context}; "
            "shorten it or raise model.context"
        )
        usual = [length for length in lengths if length + 1 <= context] or [1]
        yield Conflict(
            (f"workload.lengths={_shown(lengths)}",), reason, f"workload.lengths={_shown(usual)}"
        )


def check_context(lengths: Sequence[int], needed: int, context: int) -> None:
    """Raises WorkloadError where runs of these lengths need more tokens than the context has."""
    for fault in context_faults(lengths, needed, context):
        raise WorkloadError(f"{fault.keys[0]}: {fault.reason}")


def _shown(values: Sequence[object]) -> str:
    return f"[{','.join(map(str, values))}]"
