"""Exceptions addressed to the user: one line that says what, where, and how to mend it."""

from __future__ import annotations


class ResidencyError(Exception):
    """Base of every error a user can cause. The CLI prints its text alone and exits with 2."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    """`text` without the line breaks that a value quoted in it may have brought."""
    return " ".join(text.splitlines())


class ConfigError(ResidencyError):
    """A key, a value or a combination that cannot work."""


class CheckpointError(ResidencyError):
    """A model folder that cannot be loaded: names the file and the tensor."""


class WorkloadError(ResidencyError):
    """A prompt or request that this model or this plan cannot serve."""


class CapacityError(ResidencyError):
    """Memory that does not suffice: gives the numbers and the key to change."""


class DeviceError(ResidencyError):
    """The machine failed at something: says what was under way, and whether the engine goes on."""


class OutputError(ResidencyError):
    """A result that cannot be written where it was asked for."""


class PolicyError(ResidencyError):
    """A policy that breaks its contract: names the policy and the rule."""
