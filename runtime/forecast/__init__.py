"""Forecasts: what a combination will take, from measured constants, before anything is loaded."""
