"""s3fifo: three queues; an expert must be used twice in a small one to reach the main one.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New experts enter the
small queue, a tenth of the slots; those that the ghost queue remembers enter the main queue. When
room is needed, the small queue gives up its oldest: to the main queue if it was used at least twice
since it entered, else out of the slots, into the ghosts. If the main queue is over its share, it
gives up its oldest instead: back to its own end with one use less if it has any, else out. Uses are
counted up to 3; ghosts are as many as nine tenths of the slots. As in libCacheSim, before the first
eviction what finds the small queue full enters the main queue.

Moving experts until one falls out is a loop, but where it ends can be told in closed form. In the
small queue the first to go is the oldest with less than two uses, and all older ones move on. In
the main queue a round costs every expert a use, so the first to go is the one of the lowest (uses,
place); then all that lie behind it have been passed `uses` times, those before it once more.
"""

from __future__ import annotations

import torch

from residency.policies.cache.base import CachePolicy
from residency.policies.step import IdSpace, Step

SMALL_SHARE, GHOST_SHARE = 0.1, 0.9
ENOUGH_USES, MAX_USES = 2, 3
NOWHERE, SMALL, MAIN = 0, 1, 2
LAST = (1 << 56) - 1  # above every place in a queue
USES_BIT, CLASS_BIT = 56, 60


class S3Fifo(CachePolicy):
    """Key = (whose turn the queue is, uses, place): the order in which the queues give up experts.

    One expert at a time the rule is the paper's. Experts that one step misses leave in the order
    that the queues have when the step begins, and experts that the step needs are passed over where
    they are. Where each layer has its own slots, it has its own queues. Has no fused form:
    following an admission and a touch takes about 190 small operations over all ids.
    """

    follows_moves = True

    def allocate(self, space: IdSpace, device: torch.device) -> None:
        super().allocate(space, device)
        self._shape = self.num_shares(space), -1
        slots = self.num_slots(space) // self.num_shares(space)
        self._small_size = max(1, int(slots * SMALL_SHARE))
        self._main_size = slots - self._small_size
        self._num_ghosts = max(1, int(slots * GHOST_SHARE))
        self.queues = torch.zeros_like(self.keys)  # NOWHERE, SMALL or MAIN
        self.places = torch.zeros_like(self.keys)  # within its queue, the oldest lowest
        self.uses = torch.zeros_like(self.keys)  # since it entered, of what is resident
        self.ghosts = torch.zeros_like(self.keys)  # place among the ghosts, 0 for none
        self.has_left = torch.zeros_like(self.keys, dtype=torch.bool)  # ever

    def touch(self, ids: torch.Tensor, step: Step) -> None:
        self.uses[ids] = (self.uses[ids] + 1).clamp_(max=MAX_USES)
        self._rank()

    def moved(self, entered: torch.Tensor, evicted: torch.Tensor) -> None:
        new, ghosts = self._mask(entered), self._shared(self.ghosts)
        known = new & (ghosts > 0)
        ghosts.masked_fill_(new, 0)  # before those who leave need its room
        self._leave(self._mask(evicted))
        self._enter(new, known)
        self._rank()

    def _leave(self, out: torch.Tensor) -> None:
        """Move on what had to make way before `out` could go. bool [shares, ids]."""
        queues, places, uses, has_left = map(
            self._shared, (self.queues, self.places, self.uses, self.has_left)
        )
        small, main = queues == SMALL, queues == MAIN
        was_over = main.sum(1, keepdim=True) > self._main_size
        # The small queue, as far as it gave up experts, or to its end if the main one had to.
        waiting = small & (uses >= ENOUGH_USES)
        unused = small & out & ~waiting
        emptied = (out & ((main & ~was_over) | waiting)).any(1, keepdim=True)
        passed = waiting & ((places < _highest(places, unused)) | emptied)
        self._haunt(unused, places)
        tail = _highest(places, main) + 1 - _lowest(places, small)
        places.copy_(torch.where(passed, places + tail, places))
        uses.masked_fill_(passed, 0)
        queues.masked_fill_(passed, MAIN)
        # The main queue: the last to go says how far the rounds went.
        main = main | passed
        rank = (uses << USES_BIT) | places
        last = _highest(rank, main & out)
        rounds, place = last >> USES_BIT, last & LAST
        again = main & (places < place)
        visits = torch.where(main & (last > 0), rounds + again, 0)
        uses.copy_((uses - visits).clamp_(min=0))
        behind = _highest(places, main) + 1 - _lowest(places, main)
        places.copy_(torch.where(again, places + behind, places))
        queues.masked_fill_(out, NOWHERE)
        has_left.logical_or_(out)

    def _haunt(self, out: torch.Tensor, places: torch.Tensor) -> None:
        """Remember who left the small queue, as many as there is room for."""
        ghosts = self._shared(self.ghosts)
        behind = _highest(ghosts, ghosts > 0) + 1 - _lowest(places, out)
        ghosts.copy_(torch.where(out, places + behind, ghosts))
        kept = min(self._num_ghosts, ghosts.shape[1])
        ghosts.masked_fill_(ghosts < ghosts.topk(kept, dim=1).values[:, -1:], 0)

    def _enter(self, new: torch.Tensor, known: torch.Tensor) -> None:
        """bool [shares, ids]; known: those of the new that were ghosts."""
        queues, places, uses, has_left = map(
            self._shared, (self.queues, self.places, self.uses, self.has_left)
        )
        small, main, unknown = queues == SMALL, queues == MAIN, new & ~known
        fills = small.sum(1, keepdim=True) + unknown.cumsum(1) > self._small_size
        into_main = known | (unknown & fills & ~has_left.any(1, keepdim=True))
        into_small = new & ~into_main
        for into, queue, old in ((into_small, SMALL, small), (into_main, MAIN, main)):
            places.copy_(torch.where(into, _highest(places, old) + into.cumsum(1), places))
            queues.masked_fill_(into, queue)
        uses.masked_fill_(new, -1)  # the touch of the step that brought it counts for nothing

    def _rank(self) -> None:
        """keys: the small queue's turn comes before the main one's, unless that is over its size.

        What the small queue would pass on goes as the main queue's youngest.
        """
        keys, queues, places, uses = map(
            self._shared, (self.keys, self.queues, self.places, self.uses)
        )
        small, main = queues == SMALL, queues == MAIN
        is_over = main.sum(1, keepdim=True) > self._main_size
        waiting = small & (uses >= ENOUGH_USES)
        turn = torch.where(main & is_over, 0, torch.where(small & ~waiting, 1, 2))
        behind = _highest(places, main) + 1 - _lowest(places, small)
        place = torch.where(waiting, places + behind, places)
        spent = torch.where(main, uses.clamp(min=0), 0)
        rank = (turn << CLASS_BIT) | (spent << USES_BIT) | place
        keys.copy_(torch.where(small | main, rank, 0))

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [shares, ids of one]."""
        return self._shared(torch.zeros_like(self.has_left).index_fill_(0, ids, True))

    def _shared(self, values: torch.Tensor) -> torch.Tensor:
        """View [shares, ids of one]."""
        return values[: self.space.num_ids].view(self._shape)


def _highest(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[shares, 1], 0 for none."""
    return torch.where(where, values, 0).amax(1, keepdim=True)


def _lowest(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[shares, 1], LAST for none."""
    return torch.where(where, values, LAST).amin(1, keepdim=True)
