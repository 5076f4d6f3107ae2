"""Workloads: what is run on an engine."""

from residency.runtime.workloads.base import Measurement, Workload

__all__ = ["Measurement", "Workload"]
