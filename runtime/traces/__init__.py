"""Recorded routes: their format, what others write, and what they show."""

from residency.runtime.traces.following import read_trace
from residency.runtime.traces.reading import read
from residency.runtime.traces.trace import Trace

__all__ = ["Trace", "read", "read_trace"]
