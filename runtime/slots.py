"""The slot pool: which experts lie in the device's slots."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch

from residency.policies.cache import CachePolicy
from residency.policies.errors import PolicyError
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.admission import Admission, admit, distinct
from residency.runtime.host_admission import admit_on_host, distinct_on_host
from residency.runtime.rules import CacheRules

Touch = Callable[[torch.Tensor, Step], None]


class SlotPool:
    """The two maps between expert ids and slots, ruled by one cache policy.

    slot_of: int32 [num_ids + 1], -1 where absent; the last entry belongs to the sink id.
    id_of: int32 [num_slots], the sink id where a slot is empty.
    """

    def __init__(
        self, space: IdSpace, num_slots: int, policy: CachePolicy, device: torch.device
    ) -> None:
        self.space = space
        self.policy = policy
        self.slot_of = torch.full((space.num_ids + 1,), -1, dtype=torch.int32, device=device)
        self.id_of = torch.full((num_slots,), space.sink, dtype=torch.int32, device=device)
        self._twin: SlotPool | None = None
        self.rules = CacheRules(policy)
        self._touched: set[Phase] = set()
        with self.rules.calling("allocate"):
            policy.allocate(space, device)
        self.rules.begin(space, device)
        self.nobody = torch.full((1,), space.sink, dtype=torch.int64, device=device)
        now = torch.zeros((), dtype=torch.int64, device=device)
        self.share_size = num_slots // policy.num_shares(space)  # slots that a layer may take
        self.has_shares = policy.num_shares(space) > 1  # a layer has its own
        self._may_decline = {
            phase: self._answer(self.nobody, Step(now, 0, phase)) is not None for phase in Phase
        }
        self._fresh = {name: tensor.clone() for name, tensor in policy.state().items()}

    @property
    def num_slots(self) -> int:
        return len(self.id_of)

    def num_empty(self, layer: int) -> int:
        """Of the slots that the layer's experts may take, in a pool on the host."""
        slots = self.slots_for(layer)
        held = self.id_of.numpy()[slots.start : slots.stop]
        return int(np.count_nonzero(held == self.space.sink))

    def empty(self) -> None:
        """Nothing is resident any more; the policy remembers what it knew."""
        self.moved(self.nobody, self.id_of.long())
        self.slot_of.fill_(-1)
        self.id_of.fill_(self.space.sink)

    def place(self, id_of: torch.Tensor) -> None:
        """Say that these experts lie in the slots, int32 [num_slots]; the policy is not told."""
        self.id_of.copy_(id_of)
        self.slot_of.fill_(-1)
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=self.device)
        self.slot_of.index_copy_(0, id_of.long(), slots)
        self.slot_of[self.space.sink :].fill_(-1)

    def clear(self) -> None:
        """Empty all slots and start the policy anew, in place: captured graphs stay valid."""
        self.empty()
        for name, tensor in self.policy.state().items():
            tensor.copy_(self._fresh[name])

    def layer_slots(self, layer: int) -> torch.Tensor:
        """int32 [E] view: the slot of each of the layer's experts, -1 where absent."""
        first = layer * self.space.num_experts
        return self.slot_of[first : first + self.space.num_experts]

    @property
    def device(self) -> torch.device:
        return self.slot_of.device

    def on_host(self) -> SlotPool:
        """This pool on the CPU: itself if it is there, else a twin with the same state.

        For steps that the host plans anyway: small operations are cheaper there than launches.
        """
        if self.device.type == "cpu":
            return self
        if self._twin is None:
            policy = copy.copy(self.policy)
            self._twin = SlotPool(self.space, self.num_slots, policy, torch.device("cpu"))
        self._twin.take(self, prompts=True)
        return self._twin

    def take(self, other: SlotPool, *, prompts: bool = False) -> None:
        """Take over the state of a pool of the same shape under the same policy.

        prompts: only what a prompt's steps read and change.
        """
        if other is self:
            return
        self.slot_of.copy_(other.slot_of)
        self.id_of.copy_(other.id_of)
        states = self.policy.state(), other.policy.state()
        for name, tensor in states[0].items():
            if not (prompts and name in self.policy.decode_alone):
                tensor.copy_(states[1][name])

    def admit(
        self, experts: torch.Tensor, step: Step, quota: torch.Tensor | None = None
    ) -> Admission:
        """Admit what `experts` (int [N] within the layer) lacks, as policy and quota allow."""
        unique = self.distinct(experts, step.layer)
        form = admit_on_host if self.device.type == "cpu" else admit
        keys, admitted = self.policy.keys, self.welcomes(unique, step)
        slots = self.slots_for(step.layer)
        admission = form(unique, self.slot_of, self.id_of, keys, admitted, quota, slots)
        self.moved(admission.entered, admission.evicted)
        return admission

    def slots_for(self, layer: int) -> range:
        """The slots that the layer's experts may take."""
        first = layer * self.share_size if self.has_shares else 0
        return range(first, first + self.share_size)

    def distinct(self, experts: torch.Tensor, layer: int) -> torch.Tensor:
        """Distinct global ids of `experts` (int [N] within the layer), ascending: int64 [M].

        On a device M is fixed by N, and the sink id pads them.
        """
        if self.device.type != "cpu":
            return distinct(experts, layer, self.space)
        ids = distinct_on_host(experts.numpy(), self.space.num_experts)
        return torch.from_numpy(ids + layer * self.space.num_experts)

    def may_decline(self, step: Step) -> bool:
        """Whether the policy could leave a missing expert out of the slots in this phase."""
        return self._may_decline[step.phase]

    # What the policy is asked and told. Raises PolicyError where it breaks its contract.

    def welcomes(self, ids: torch.Tensor, step: Step) -> torch.Tensor | None:
        """See `CachePolicy.welcomes`."""
        admitted = self._answer(ids, step)
        if (admitted is not None) is not self.may_decline(step):
            self.rules.calling("admits").refuse("answers None at one time and not at another")
        return admitted

    def _answer(self, ids: torch.Tensor, step: Step) -> torch.Tensor | None:
        with self.rules.calling("admits"):
            admitted = self.policy.welcomes(ids, step)
        self.rules.check_admitted(admitted, ids)
        return admitted

    def moved(self, entered: torch.Tensor, evicted: torch.Tensor) -> None:
        """Tell the policy who has entered and left, if it follows that."""
        if self.policy.follows_moves:
            with self.rules.calling("moved"):
                self.policy.moved(entered, evicted)
            self.rules.check_keys("moved")

    def refresh(self, step: Step) -> None:
        """See `CachePolicy.refresh`."""
        with self.rules.calling("refresh"):
            self.policy.refresh(step)
        self.rules.check_keys("refresh")

    def rebase(self, tokens: int) -> None:
        """See `CachePolicy.rebase`."""
        with self.rules.calling("rebase"):
            self.policy.rebase(tokens)
        self.rules.check_state("rebase")

    def promoted(self, num_tokens: int, behind: int) -> int:
        """See `CachePolicy.promoted`."""
        with self.rules.calling("promoted"):
            promoted = self.policy.promoted(num_tokens, behind)
        self.rules.check_promoted(promoted, num_tokens)
        return promoted

    def touch(self, unique: torch.Tensor, step: Step, form: Touch | None = None) -> None:
        """form: what does the same as the policy's touch; None for that itself."""
        with self.rules.calling("touch"):
            (form or self.policy.touch)(unique, step)
        self.rules.check_keys("touch")
        if step.phase not in self._touched:  # the first time
            self._touched.add(step.phase)
            self.rules.check_state("touch")

    def check(self) -> None:
        """Recompute each map from the other and compare. Raises PolicyError on any difference, and
        for a policy whose state is not where it was.
        """
        self.rules.check_state("touch")
        self.rules.check_numbers()
        ids, slots = self.id_of.long().cpu(), self.slot_of.long().cpu()
        taken = (ids != self.space.sink).nonzero().flatten()
        resident = (slots >= 0).nonzero().flatten()
        if len(taken) != len(resident) or not torch.equal(slots[ids[taken]], taken):
            raise PolicyError(
                f"cache={self.policy.name}: slot maps disagree: {len(taken)} slots are taken, "
                f"{len(resident)} experts say they lie in one, of {self.num_slots} slots"
            )
