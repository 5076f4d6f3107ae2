"""Models: where weights come from."""

from residency.runtime.models.base import Model

__all__ = ["Model"]
