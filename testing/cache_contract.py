"""What must hold of every cache policy, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from safetensors.torch import load, save

from residency.policies.cache import CachePolicy
from residency.policies.step import IdSpace, Phase, Step
from residency.runtime.slots import SlotPool
from residency.testing.graphs import Capture

SPACE = IdSpace(num_layers=3, num_experts=16, top_k=4)
NUM_TOKENS = 40
CHUNK_TOKENS = 10
NUM_SLOTS = 12  # of the 48 experts


class CachePolicyContract:
    """Subclass it in a test module with `policy` set, and `params` for a config of your own."""

    policy: ClassVar[type[CachePolicy]]
    params: ClassVar[dict[str, Any]] = {}

    def make(self, device: str = "cpu", **params: Any) -> CachePolicy:
        policy = self.policy(self.policy.Config(**(self.params | params)))
        policy.allocate(SPACE, torch.device(device))
        return policy

    def run(self, policy: CachePolicy, seed: int = 0, first_token: int = 1) -> None:
        """Touch as a decode would: tokens in order, each layer's distinct experts, some padding.

        Missing experts take the place of those that have been resident longest.
        """
        residents: list[int] = []
        generator = torch.Generator().manual_seed(seed)
        device = policy.keys.device
        for token in range(first_token, first_token + NUM_TOKENS):
            for layer in range(SPACE.num_layers):
                step = Step(torch.tensor(token, device=device), layer, Phase.DECODE)
                if layer == 0:
                    policy.refresh(step)
                experts = torch.randperm(SPACE.num_experts, generator=generator)[: SPACE.top_k]
                ids = (experts.sort().values + layer * SPACE.num_experts).to(device)
                ids[token % SPACE.top_k + 1 :] = SPACE.sink
                policy.admits(ids, step)
                if policy.follows_moves:
                    policy.moved(*_moves(ids, residents))
                policy.touch(ids, step)

    def prefill(self, policy: CachePolicy, first_token: int = 1) -> None:
        """Touch as a prefill would: chunks of a prompt, of each the experts of what is promoted."""
        generator = torch.Generator().manual_seed(0)
        for chunk in range(NUM_TOKENS // CHUNK_TOKENS):
            behind = NUM_TOKENS - (chunk + 1) * CHUNK_TOKENS
            count = policy.promoted(CHUNK_TOKENS, behind)
            for layer in range(SPACE.num_layers):
                token = torch.tensor(first_token + (chunk + 1) * CHUNK_TOKENS - 1)
                step = Step(token, layer, Phase.PREFILL)
                if layer == 0:
                    policy.refresh(step)
                scores = torch.rand(CHUNK_TOKENS, SPACE.num_experts, generator=generator)
                experts = scores.topk(SPACE.top_k).indices[CHUNK_TOKENS - count :].unique()
                if count:
                    policy.admits(experts + layer * SPACE.num_experts, step)
                    policy.touch(experts + layer * SPACE.num_experts, step)

    def test_of_a_chunk_only_tokens_of_its_own_are_promoted(self) -> None:
        for params in self._by_prefill_tokens("all", 0, 7, 10 * NUM_TOKENS):
            policy = self.make(**params)
            for size in (1, CHUNK_TOKENS, NUM_TOKENS):
                for behind in (0, 3, NUM_TOKENS):
                    assert 0 <= policy.promoted(size, behind) <= size

    def test_an_unpromoted_prompt_leaves_the_state_as_it_was(self) -> None:
        """But for what time alone does to it."""
        for params in self._by_prefill_tokens(0):
            policy, other = self.make(**params), self.make(**params)
            for one in (policy, other):
                self.run(one)
            self.prefill(policy, first_token=NUM_TOKENS + 1)
            token = torch.tensor(2 * NUM_TOKENS)
            other.refresh(Step(token, 0, Phase.PREFILL))
            for name, tensor in _known(policy).items():
                assert torch.equal(tensor, _known(other)[name]), f"a prompt changed {name}"

    def _by_prefill_tokens(self, *values: int | str) -> list[dict[str, Any]]:
        """Params with each value of the key, where the policy has it."""
        if "prefill_tokens" not in {field.name for field in fields(self.policy.Config)}:
            return [{}]
        return [{"prefill_tokens": value} for value in values]

    def test_two_equal_runs_leave_equal_state(self) -> None:
        first, second = self.make(), self.make()
        for one in (first, second):
            self.run(one)
            self.prefill(one, first_token=NUM_TOKENS + 1)
        for name, tensor in _known(first).items():
            assert torch.equal(tensor, _known(second)[name]), f"{name} differs between equal runs"

    def test_state_stays_where_it_is(self) -> None:
        """A captured graph reads and writes the tensors of its capture for ever."""
        policy = self.make()
        before = {name: (t.data_ptr(), t.shape, t.dtype) for name, t in policy.state().items()}
        self.run(policy)
        policy.rebase(NUM_TOKENS // 2)
        after = {name: (t.data_ptr(), t.shape, t.dtype) for name, t in policy.state().items()}
        assert before == after, "state was replaced instead of updated in place"

    def test_no_step_needs_the_host(self) -> None:
        """Meta tensors have no values: whatever reads one on the host raises here."""
        policy = self.make("meta")
        ids = torch.empty(SPACE.top_k, dtype=torch.int64, device="meta")
        for phase in Phase:
            step = Step(torch.empty((), dtype=torch.int64, device="meta"), 1, phase)
            policy.refresh(step)
            policy.admits(ids, step)
            policy.moved(ids, ids)
            policy.touch(ids, step)

    def test_a_captured_step_replays_as_it_runs(self) -> None:
        """In a CUDA graph where there is a GPU, in an emulated one elsewhere."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        eager, replayed = self.make(device), self.make(device)
        for one in (eager, replayed):
            self.run(one)
        token = torch.tensor(NUM_TOKENS, device=device)
        ids_LK = torch.zeros(SPACE.num_layers, SPACE.top_k, dtype=torch.int64, device=device)
        generator = torch.Generator().manual_seed(3)
        replay = None
        for _ in range(4):
            token += 1
            scores_LE = torch.rand(SPACE.num_layers, SPACE.num_experts, generator=generator)
            first_L1 = torch.arange(SPACE.num_layers)[:, None] * SPACE.num_experts
            ids_LK.copy_(scores_LE.topk(SPACE.top_k).indices.sort().values + first_L1)
            _steps(eager, token, ids_LK)
            if replay is None:
                replay = _captured(replayed, token, ids_LK)
            else:
                replay()
            for name, tensor in _known(eager).items():
                assert torch.equal(tensor, _known(replayed)[name]), f"{name} differs in a replay"

    def test_no_expert_of_the_step_in_flight_is_evicted(self) -> None:
        """A live run in a pool that a step fills."""
        has_slots = "slots" in {field.name for field in fields(self.policy.Config)}
        params: dict[str, Any] = {"slots": SPACE.num_ids // 4} if has_slots else {}
        policy = self.make(**params)
        pool = SlotPool(SPACE, policy.num_slots(SPACE), policy, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for token in range(NUM_TOKENS):
            for layer in range(SPACE.num_layers):
                step = Step(torch.tensor(token), layer, Phase.DECODE)
                if layer == 0:
                    pool.refresh(step)
                experts = torch.randperm(SPACE.num_experts, generator=generator)[: SPACE.top_k]
                admission = pool.admit(experts, step)
                welcome = pool.welcomes(admission.unique, step)
                stays = admission.unique if welcome is None else admission.unique[welcome]
                assert (pool.slot_of[stays] >= 0).all(), "an expert in use has no slot"
                pool.touch(admission.unique, step)
        pool.check()

    def test_keys_are_int64_for_every_id_and_the_sink(self) -> None:
        policy = self.make()
        self.run(policy)
        assert policy.keys.dtype == torch.int64
        assert policy.keys.shape == (SPACE.num_ids + 1,)

    def test_admits_answers_for_each_id_or_for_all(self) -> None:
        policy = self.make()
        ids = torch.arange(SPACE.top_k)
        for phase in Phase:
            admitted = policy.admits(ids, Step(torch.tensor(1), 0, phase))
            assert admitted is None or (admitted.dtype, admitted.shape) == (torch.bool, ids.shape)

    def test_saved_state_continues_as_if_never_saved(self) -> None:
        through, restored = self.make(), self.make()
        self.run(through)
        saved = load(save(through.state()))
        for name, tensor in restored.state().items():
            tensor.copy_(saved[name])
        self.run(through, seed=1, first_token=NUM_TOKENS + 1)
        self.run(restored, seed=1, first_token=NUM_TOKENS + 1)
        for name, tensor in _known(through).items():
            assert torch.equal(tensor, _known(restored)[name]), f"{name} was not part of the state"

    def test_rebasing_keeps_the_order(self) -> None:
        policy = self.make()
        self.run(policy, first_token=1000)
        before = policy.keys[: SPACE.num_ids].argsort(stable=True)
        policy.rebase(900)
        assert torch.equal(policy.keys[: SPACE.num_ids].argsort(stable=True), before)


def _steps(policy: CachePolicy, token: torch.Tensor, ids_LK: torch.Tensor) -> None:
    """One token through all layers."""
    for layer, ids in enumerate(ids_LK):
        step = Step(token, layer, Phase.DECODE)
        if layer == 0:
            policy.refresh(step)
        policy.admits(ids, step)
        if policy.follows_moves:
            policy.moved(ids, ids_LK[layer - 1])
        policy.touch(ids, step)


def _captured(policy: CachePolicy, token: torch.Tensor, ids_LK: torch.Tensor) -> Callable[[], None]:
    """Has run the steps once; what runs them again, on what the two tensors hold then."""
    if token.device.type == "cpu":
        with Capture() as capture:
            _steps(policy, token, ids_LK)
        emulated: Callable[[], None] = capture.replay
        return emulated
    before = {name: tensor.clone() for name, tensor in policy.state().items()}
    _steps(policy, token, ids_LK)  # libraries make their plans outside of a capture
    for name, tensor in policy.state().items():
        tensor.copy_(before[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _steps(policy, token, ids_LK)

    def replay() -> None:
        graph.replay()

    replay()  # capturing has run nothing
    return replay


def _moves(ids: torch.Tensor, residents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that enter and ids that leave as `moved` takes them; updates `residents`."""
    missing = [i for i in ids.tolist() if i not in residents and i != SPACE.sink]
    num_leaving = max(0, len(residents) + len(missing) - NUM_SLOTS)
    leaving, residents[:] = residents[:num_leaving], [*residents[num_leaving:], *missing]
    padded = torch.full((2, len(ids)), SPACE.sink, device=ids.device)
    padded[0, : len(missing)] = torch.tensor(missing, dtype=torch.int64)
    padded[1, :num_leaving] = torch.tensor(leaving, dtype=torch.int64)
    return padded[0], padded[1]


def _known(policy: CachePolicy) -> dict[str, torch.Tensor]:
    """The state without the sink's row, which may hold anything."""
    return {name: tensor[: SPACE.num_ids] for name, tensor in policy.state().items()}
