"""Composition: from Hydra overrides to checked, typed parts, and from parts to an engine."""

from residency.conf.build import build_engine
from residency.conf.compose import Config, compose

__all__ = ["Config", "build_engine", "compose"]
