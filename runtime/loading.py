"""Loading: experts go from safetensors straight into the banks, all else into the model."""

from __future__ import annotations

from residency.runtime.architecture import Architecture
from residency.runtime.bank_reader import Progress, read_banks
from residency.runtime.banks import Banks
from residency.runtime.expert_sources import ExpertSources
from residency.runtime.free_memory import free_host_bytes
from residency.runtime.shards import Shards

__all__ = ["Progress", "load_banks"]


def load_banks(
    architecture: Architecture, experts: ExpertSources, progress: Progress | None = None
) -> Banks:
    """Read every expert tensor once, into its place.

    Raises CheckpointError naming file and key of one that cannot be read, or has a NaN scale.
    """
    banks = Banks(architecture.space, architecture.layout)
    # What does not fit beside the banks would be pushed out of the file cache unread anyway, and
    # until then stand in the way of huge pages.
    fits = banks.num_bytes + experts.num_bytes < free_host_bytes()
    with Shards(keep_cached=fits) as shards:
        read_banks(banks, experts.sources, shards, progress)
    return banks
