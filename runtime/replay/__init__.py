"""Replay: recorded routes under other policies and pool sizes, and what no policy could beat."""
