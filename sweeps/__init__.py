"""Sweeps: many combinations, one after another, each with a folder of its own."""
