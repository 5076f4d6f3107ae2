"""The catalogue, and a model's sizes, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.table import Table

from residency.conf.catalog import MATRIX_GROUPS, Cell, Option
from residency.runtime.inspection import Inspection


def options_table(options: Iterable[Option]) -> Table:
    """One row an option."""
    table = Table("group", "name", "what it does", "parameters")
    for option in options:
        keys = ", ".join(p.key for p in option.parameters)
        table.add_row(option.group, option.name, option.summary, keys or "-")
    return table


def parameter_tables(option: Option) -> Iterator[Table]:
    """The option's parameters, if it has any."""
    table = Table("parameter", "default", "meaning")
    for parameter in option.parameters:
        key = f"{option.group}.{parameter.key}"
        table.add_row(key, str(parameter.default), parameter.meaning)
    if option.parameters:
        yield table


def matrix_table(cells: Iterable[Cell]) -> Table:
    """One row a combination, with its verdict."""
    table = Table(*MATRIX_GROUPS, "verdict")
    for cell in cells:
        verdict = "\n".join(map(str, cell.conflicts)) or "works"
        table.add_row(*cell.choices.values(), verdict)
    return table


def inspection_tables(model: Inspection) -> Iterator[Table]:
    """The model, and the pools that devices afford."""
    yield _sizes_table(model)
    yield _pools_table(model)


def _sizes_table(model: Inspection) -> Table:
    table = Table(title=f"{model.model_type}: {model.model}", title_justify="left")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    made_up = " (weights: made up)" if model.made_up else ""
    shared = f", {model.shared_experts} shared" if model.shared_experts else ""
    rows = {
        "layers": f"{model.moe_layers} MoE, {model.dense_layers} dense",
        "experts of a layer": f"{model.experts}, top-{model.top_k}{shared}",
        "experts that a token touches": f"{model.cycle:,}",
        "format of the experts": f"{model.format}{made_up}",
        "as said in": Path(model.format_source).name,
        "an expert": _size(model.expert_bytes),
        "a layer's experts": _size(model.layer_bytes),
        "all experts, in host memory": _size(model.bank_bytes),
        f"other weights, in {model.dtype}": _size(model.weight_bytes),
        "of those, dequantised": _size(model.dequantised_bytes),
        "KV cache of a token": _size(model.kv_bytes_per_token),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _pools_table(model: Inspection) -> Table:
    fixed = {
        "weights": model.weight_bytes,
        "staging": model.staging_bytes,
        f"KV of {model.context:,} tokens": model.kv_bytes,
        "workspace": model.workspace_bytes,
        "graphs": model.graph_bytes,
        "maps of slots": model.policy_bytes,
        "reserve": model.reserved_bytes,
    }
    table = Table(
        title="Slots for experts, by the memory of the GPU",
        caption=f"after {_size(model.fixed_bytes)}: "
        + ", ".join(f"{name} {_size(size)}" for name, size in fixed.items()),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("GPU memory")
    for name in ("slots", "of all experts", "tokens' worth of experts"):
        table.add_column(name, justify="right")
    for pool in model.pools:
        if pool.slots:
            table.add_row(pool.device, f"{pool.slots:,}", f"{pool.share:.1%}", f"{pool.cycles:.1f}")
        else:
            table.add_row(pool.device, "does not fit", "-", "-")
    return table


def _size(num_bytes: int) -> str:
    """In the largest binary unit of which there is at least one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} bytes"
