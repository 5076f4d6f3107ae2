"""The engine: one model under one combination of policies, ready to generate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import Self

import torch

from residency.policies.errors import CheckpointError, ConfigError, WorkloadError
from residency.policies.step import Phase
from residency.runtime.architecture import Architecture
from residency.runtime.environment import environment
from residency.runtime.generation import Generation, text_pieces
from residency.runtime.hooks import add_experts, attach, detach
from residency.runtime.loaded import Loaded
from residency.runtime.loading import Progress
from residency.runtime.memory import MemoryPlan, row_faults
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.recorder import RouteRecorder
from residency.runtime.replacements.seam import Seam
from residency.runtime.report import PhaseTotals, Report
from residency.runtime.routing import Routing
from residency.runtime.sampling import Sampler, Sampling
from residency.runtime.sequence import Sequence, capacity_for
from residency.runtime.weights import Weights


class Engine:
    """Loads a model under `policies` and generates. Not safe for use from several threads."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        policies: Policies,
        device: torch.device,
        *,
        context: int = 0,
        routing: Routing | None = None,
        kernels: bool = True,
        allow_pageable: bool = False,
        progress: Progress | None = None,
        notes: Ids[str] = (),
    ) -> None:
        """Raises CheckpointError, ConfigError or CapacityError before any large memory is taken.

        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        routing: replaces the model's routes; its tables lie on `device`.
        kernels: compute experts by kernels where the device has them, else in plain torch.
        allow_pageable: run with banks that could not be pinned, more slowly and without kernels.
        notes: lines the report repeats, e.g. which device an automatic choice took.
        """
        self.policies = policies
        self.device = device
        self.notes = list(notes)
        self.architecture = architecture
        self.context = context or architecture.max_context
        self.routing = routing
        self.made_up = weights.made_up
        plan = plan_memory(architecture, policies, self.context)
        plan.check(device)
        self._loaded = Loaded(
            architecture,
            weights,
            device,
            kernels=kernels,
            allow_pageable=allow_pageable,
            progress=progress,
        )
        self.model, self.banks = self._loaded.model, self._loaded.banks
        self.tokenizer, self.load_s = self._loaded.tokenizer, self._loaded.load_s
        self._loaded.fuse_layers(
            Seam(position_of=lambda: self.runtime.position, add_experts=add_experts)
        )
        self.notes += self._loaded.notes
        self._sequence: Sequence | None = None
        self._install(policies, plan)

    def _install(self, policies: Policies, plan: MemoryPlan) -> None:
        """Stand a runtime under these policies behind the model's experts."""
        self._sequence = None
        self.policies = policies
        self.runtime = OffloadRuntime(
            self.banks, policies, plan, self.device, self.routing, shape=self._loaded.shape
        )
        attach(self.model, self.architecture.expert_modules, self.runtime)

    def _uninstall(self) -> None:
        """Let go of the runtime and the memory of its slots."""
        detach(self.model, self.architecture.expert_modules)
        self._sequence = None
        del self.runtime
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def reconfigured(self, policies: Policies) -> Iterator[None]:
        """Inside, the same banks and model run under other policies; the old ones return after.

        Slots and policies' memories start empty both times. Raises ConfigError or CapacityError
        when the new policies cannot be had; the old ones run on then.
        """
        old, old_plan = self.policies, self.runtime.plan
        plan = plan_memory(self.architecture, policies, self.context)
        self._uninstall()
        try:
            plan.check(self.device, loaded=True)
            self._install(policies, plan)
            yield
        finally:
            if hasattr(self, "runtime"):
                self._uninstall()
            self._install(old, old_plan)

    def record_routes(self) -> RouteRecorder:
        """From now on, up to one context of tokens, note where each token is routed."""
        self._sequence = None  # a graph captured before would not record
        space, clock = self.architecture.space, self.runtime.clock
        self.runtime.recorder = RouteRecorder(space, self.context, clock, self.device)
        return self.runtime.recorder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of banks, slots and model; the engine cannot be used afterwards."""
        detach(self.model, self.architecture.expert_modules)
        self._sequence = None
        del self.runtime, self.model, self.banks
        self._loaded.close()

    def generate(
        self,
        prompt: str | Ids[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop_tokens: Ids[int] = (),
        ignore_eos: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> Report:
        """Prefill `prompt` and decode up to max_new_tokens.

        prompt: text, or token ids. on_text sees each piece of text as it is decoded, on_logits the
        logits [V] behind each new token. The slots and the policy's history stay as they are
        afterwards; counters start at zero. Raises WorkloadError for a prompt that is empty or,
        with its answer, longer than the context.
        """
        ids = self._encode(prompt, max_new_tokens)
        self.runtime.counters.reset()
        stops = frozenset(stop_tokens) | (frozenset() if ignore_eos else self._eos())
        generation = Generation(
            self._sequence_for(len(ids) + max_new_tokens),
            Sampler(sampling or Sampling(), self.device),
            self.policies.prefill.config.chunk_tokens,
            stops,
            on_logits=on_logits,
        )
        pieces: list[str] = []
        for piece in self._pieces(generation, ids, max_new_tokens):
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)
        self.runtime.check()
        return self._report("".join(pieces), ids, generation)

    def _sequence_for(self, num_tokens: int) -> Sequence:
        """Room for a sequence; the last one's, and its captured graph, if it is large enough."""
        if self._sequence is None or self._sequence.capacity < num_tokens:
            self._sequence = None  # let go of the old one first
            self._sequence = Sequence(self.model, self.runtime, capacity_for(num_tokens))
        return self._sequence

    def _pieces(self, generation: Generation, ids: list[int], max_new: int) -> Iterator[str]:
        tokens = generation.tokens(ids, max_new)
        if self.tokenizer is not None:
            return text_pieces(self.tokenizer, tokens)
        return ("" for _ in tokens)

    def _encode(self, prompt: str | Ids[int], max_new_tokens: int) -> list[int]:
        if max_new_tokens < 1:
            raise WorkloadError(f"workload.max_new_tokens={max_new_tokens}: it must be at least 1")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise CheckpointError(
                    f"{self.architecture.source}: no tokenizer there, so text cannot be read; give "
                    "token ids"
                )
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
        else:
            ids = list(prompt)
        if not ids:
            raise WorkloadError("the prompt is empty; give at least one token of text")
        if len(ids) + max_new_tokens > self.context:
            raise WorkloadError(
                f"the prompt has {len(ids)} tokens and workload.max_new_tokens={max_new_tokens} "
                f"asks for more than the context of {self.context} has room for; shorten either"
            )
        return ids

    def _eos(self) -> frozenset[int]:
        eos = self.model.generation_config.eos_token_id
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def _report(self, text: str, ids: list[int], generation: Generation) -> Report:
        rows = self.runtime.counters.rows()
        seconds = (generation.prefill_s, sum(generation.step_s))
        captured = self.runtime.capturable
        copy_s = (generation.prefill_copy_s, None if captured else generation.decode_copy_s)
        phases = [
            PhaseTotals.of(p, rows, s, c) for p, s, c in zip(Phase, seconds, copy_s, strict=True)
        ]
        return Report(
            text=text,
            finish="stop" if generation.stopped else "length",
            prompt_tokens=len(ids),
            token_ids=generation.token_ids,
            ttft_s=generation.prefill_s,
            step_s=generation.step_s,
            phases=phases,
            counters=rows,
            memory=self.runtime.plan.as_dict(),
            environment=environment(self.device),
            notes=[*self.notes, *self.runtime.notes()],
        )


def plan_memory(architecture: Architecture, policies: Policies, context: int) -> MemoryPlan:
    """Raises ConfigError for slots or groups that the model cannot use."""
    space = architecture.space
    prefill = policies.prefill.config
    num_slots = policies.cache.num_slots(space)
    for fault in row_faults(space, num_slots, prefill.groups):
        raise ConfigError(str(fault))
    for fault in policies.decode.layer_faults(space.num_layers):
        raise ConfigError(str(fault))
    group_size = -(-space.num_experts // prefill.groups)
    chunk_tokens = min(prefill.chunk_tokens, context)
    row_bytes, element = architecture.layout.row_bytes, architecture.dtype.itemsize
    return MemoryPlan(
        num_slots=num_slots,
        group_size=group_size,
        ring=prefill.ring,
        # Decode reads experts that the policy declines from staging as well.
        staging_rows=max(prefill.ring * group_size, space.top_k),
        row_bytes=row_bytes,
        bank_bytes=space.num_ids * row_bytes,
        weight_bytes=architecture.num_other_parameters * element,
        kv_bytes=architecture.kv_elements(context) * element,
        workspace_bytes=architecture.workspace_elements(chunk_tokens) * element,
    )
