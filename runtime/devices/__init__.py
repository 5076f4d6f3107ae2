"""Devices: where the slots are."""

from residency.runtime.devices.base import Device

__all__ = ["Device"]
