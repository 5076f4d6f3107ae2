"""static: the experts that a profile counts most often are pinned, and no other enters a slot.

Which experts a text needs depends on its subject, so a fixed choice is worth what its profile has
in common with what is run; it never evicts. A pinned expert enters its slot when it is first
missed, and stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from residency.policies.base import Conflict
from residency.policies.cache.base import CachePolicy
from residency.policies.counts import read_counts
from residency.policies.errors import ConfigError
from residency.policies.step import IdSpace, Step


class Static(CachePolicy):
    """Key = the profile's count. Pinned are as many experts as there are slots, or a layer's share
    of them: those of the highest (count, id).
    """

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(CachePolicy.Config):
        """profile: a file of counts for each expert of each layer, or of recorded routes, which are
        counted: what `residency run --routes` writes.
        """

        profile: str = ""

    config: Config

    def faults(self) -> Iterator[Conflict]:
        yield from super().faults()
        if not self.config.profile:
            reason = "it pins the experts that a profile counts most often, and is given none"
            yield Conflict(("cache=static",), reason, "cache.profile=FILE")
            return
        yield from self._profile_faults(None)

    def shape_faults(self, space: IdSpace) -> Iterator[Conflict]:
        yield from super().shape_faults(space)
        yield from self._profile_faults(space)

    def _profile_faults(self, space: IdSpace | None) -> Iterator[Conflict]:
        try:
            read_counts(self.config.profile, space)
        except ValueError as error:
            key, mend = f"cache.profile={self.config.profile}", "cache.profile=FILE"
            yield Conflict((key,), str(error), f"{mend}, written by residency run --routes FILE")

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        for fault in self._profile_faults(space):
            raise ConfigError(str(fault))
        counts = read_counts(self.config.profile, space).flatten()
        self.keys[: space.num_ids] = counts.to(device)
        num_shares = self.num_shares(space)
        order_SI = counts.reshape(num_shares, -1).argsort(dim=1, descending=False, stable=True)
        num_pinned = min(self.num_slots(space) // num_shares, order_SI.shape[1])
        pinned_SI = torch.zeros(order_SI.shape, dtype=torch.bool)
        pinned_SI.scatter_(1, order_SI[:, order_SI.shape[1] - num_pinned :], True)
        self.pinned = torch.zeros(space.num_ids + 1, dtype=torch.bool, device=device)
        self.pinned[: space.num_ids] = pinned_SI.flatten().to(device)

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        """A use changes nothing."""

    def admits(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        return self.pinned[ids]

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Profile and slots say all there is to know."""
