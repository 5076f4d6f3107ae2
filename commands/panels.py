"""The order in which `residency --help` lists the commands, under headings."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Run": ("run", "chat"),
    "Measure": ("bench", "sweep", "report"),
    "Decide": ("inspect", "validate", "plan", "doctor"),
    "Traces": ("trace", "replay", "tune"),
    "Policies": ("policies",),
}


class Panels(TyperGroup):
    """The commands by panel; those of no panel come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        panels = {name: panel for panel, names in PANELS.items() for name in names}
        for name, command in self.commands.items():
            command.rich_help_panel = panels.get(name)  # type: ignore[attr-defined]
        order = [*panels, *self.commands]
        return sorted(self.commands, key=order.index)
