"""The routes that a model is expected to take: its table's, or what is assumed for its routers."""

from __future__ import annotations

from residency.runtime.forecast.routes import EvenRoutes, Routes, TableRoutes
from residency.runtime.models import Model
from residency.runtime.route_tables import EVEN, MODEL, SKEWED, routes_of, skewed

ASSUMED_TOKENS = 1 << 11  # of a table that is only assumed


def routes_of_model(model: Model) -> Routes:
    """By `model.routing`. A model's own routers are not known before it runs: they are assumed to
    be as uneven as recorded ones. Raises ConfigError for a trace that cannot be read.
    """
    space, name = model.architecture.space, model.config.routing
    if name == EVEN:
        return EvenRoutes(space)
    if name == MODEL:
        table = skewed(space, model.seed, ASSUMED_TOKENS)
        note = "routes: assumed as uneven and as repetitive as recorded ones (model.routing=skewed)"
        return TableRoutes(space, table.table_NLK, note)
    drawn = routes_of(name, space, model.seed)
    assert drawn is not None, f"{name} replaces the model's routes"
    note = f"routes: {name.partition(':')[0] if name == SKEWED else name}"
    return TableRoutes(space, drawn.table_NLK, note)
