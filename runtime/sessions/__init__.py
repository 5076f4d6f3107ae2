"""Recorded conversations, and the sample of real ones that comes with the package."""
