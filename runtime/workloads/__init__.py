"""Workloads: what is run on an engine."""
