"""Workloads: what is run on an engine."""

from residency.runtime.workloads.base import Workload

__all__ = ["Workload"]
