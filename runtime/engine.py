"""The engine: one model under one combination of policies, ready to generate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from residency.policies.step import Phase
from residency.runtime.architecture import Architecture
from residency.runtime.batch import Batch
from residency.runtime.batch_cache import check_batched
from residency.runtime.environment import environment
from residency.runtime.faults import Point, Work
from residency.runtime.generation import Generation, decoded_texts, eos_of
from residency.runtime.hooks import add_experts, attach, detach
from residency.runtime.kept import Kept, check_continued
from residency.runtime.lessons import Lessons, check_profile
from residency.runtime.loaded import Loaded
from residency.runtime.loading import Progress
from residency.runtime.memory import MemoryPlan, plan_memory
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.prompts import PromptReader, check_number
from residency.runtime.recorder import RouteRecorder
from residency.runtime.replacements.seam import Seam
from residency.runtime.report import BatchReport, PhaseTotals, Report, SequenceReport
from residency.runtime.routing import Routing
from residency.runtime.sampling import Sampler, Sampling
from residency.runtime.sequence import Rows, Sequence, capacity_for
from residency.runtime.state_file import save_state, warm_start
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
        batch: int = 1,
        routing: Routing | None = None,
        kernels: bool = True,
        allow_pageable: bool = False,
        verify_banks: bool = False,
        progress: Progress | None = None,
        notes: Ids[str] = (),
    ) -> None:
        """Raises CheckpointError, ConfigError or CapacityError before any large memory is taken.

        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        batch: most sequences that are decoded together.
        routing: replaces the model's routes; its tables lie on `device`.
        kernels: compute experts by kernels where the device has them, else in plain torch.
        allow_pageable: run with banks that could not be pinned, more slowly and without kernels.
        verify_banks: at the end of each generation, compare them with what was loaded.
        notes: lines the report repeats, e.g. which device an automatic choice took.
        """
        self.device = device
        self.notes = list(notes)
        self.architecture = architecture
        self.context = context or architecture.max_context
        self.batch = batch
        self.routing = routing
        self.made_up = weights.made_up
        if batch > 1:
            check_batched(architecture.config)
        self._dequantised_bytes = weights.dequantised_bytes
        plan = self._plan(policies)
        if not weights.made_up:
            plan = plan.with_checkpoint_tables(device)
        plan.check(device)
        with Work(Point.LOAD, plan, device):
            self._loaded = loaded = Loaded(
                architecture,
                weights,
                device,
                kernels=kernels,
                allow_pageable=allow_pageable,
                progress=progress,
                mapped_tables=plan.mapped_tables,
                verify_banks=verify_banks,
            )
        with loaded.closed_on_failure():
            self.model, self.banks = loaded.model, loaded.banks
            self.tokenizer, self.load_s = loaded.tokenizer, loaded.load_s
            loaded.fuse_layers(Seam(lambda: self.runtime.position, add_experts))
            self.notes += loaded.notes
            told = self.made_up, routing is not None
            self._lessons = Lessons(self.model, architecture, device, *told)
            self._install(policies, plan)

    @property
    def policies(self) -> Policies:
        return self.runtime.policies

    def _plan(self, policies: Policies) -> MemoryPlan:
        check_profile(policies.prefill)
        sizes = self.context, self.batch, self._dequantised_bytes
        return plan_memory(self.architecture, policies, *sizes)

    def _install(self, policies: Policies, plan: MemoryPlan) -> None:
        """Stand a runtime under these policies behind the model's experts."""
        self._sequence: Sequence | None = None
        self._batch: Batch | None = None
        self.runtime = OffloadRuntime(
            self.banks,
            policies,
            plan,
            self.device,
            self.routing,
            shape=self._loaded.shape,
            capturable=self._loaded.capturable,
            table_reads=self.architecture.table_reads,
            host=self._loaded.host_for(policies.decode),
            learning_of=self._lessons.of,
        )
        attach(self.model, self.architecture.expert_modules, self.runtime)
        warm_start(self.runtime)

    def _uninstall(self) -> None:
        """Let go of the runtime and the memory of its slots."""
        detach(self.model, self.architecture.expert_modules)
        self._forget_rows()
        self.runtime.close()
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
        plan = replace(self._plan(policies), mapped_tables=old_plan.mapped_tables)
        self._uninstall()
        try:
            plan.check(self.device, loaded=True)
            self._install(policies, plan)
            yield
        finally:
            if hasattr(self, "runtime"):
                self._uninstall()
            self._install(old, old_plan)

    def keep(self) -> Kept:
        """What may be continued now, to be put back later. Raises WorkloadError for nothing."""
        return Kept(self._sequence)

    def put_back(self, kept: Kept) -> None:
        """The next prompt may follow on `kept`. Raises WorkloadError if its sequence is gone."""
        kept.put_back(self._sequence)

    def record_routes(self) -> RouteRecorder:
        """From now on, up to one context of tokens, note where each token is routed."""
        self._forget_rows()  # a graph captured before would not record
        space, clock = self.architecture.space, self.runtime.clock
        self.runtime.recorder = RouteRecorder(space, self.context, clock, self.device)
        return self.runtime.recorder

    def save_state(self, file: Path) -> None:
        """Write slots and the policy's history, for `cache.warm_start`. Raises OutputError."""
        save_state(self.runtime, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of banks, slots and model; the engine cannot be used afterwards."""
        self._uninstall()
        del self.model, self.banks
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
        continued: bool = False,
        room: int = 0,
    ) -> Report:
        """`generate_batch` of one prompt; the callbacks hear of no sequence's index."""
        batch = self.generate_batch(
            [prompt],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            ignore_eos=ignore_eos,
            on_text=on_text and (lambda _, piece: on_text(piece)),
            on_logits=on_logits and (lambda _, logits_V: on_logits(logits_V)),
            continued=continued,
            room=room,
        )
        return batch.alone()

    def generate_batch(
        self,
        prompts: Ids[str | Ids[int]],
        *,
        max_new_tokens: int | Ids[int] = 128,
        sampling: Sampling | None = None,
        stop_tokens: Ids[int] = (),
        ignore_eos: bool = False,
        on_text: Callable[[int, str], None] | None = None,
        on_logits: Callable[[int, torch.Tensor], None] | None = None,
        continued: bool = False,
        room: int = 0,
    ) -> BatchReport:
        """Prefill each prompt, then decode up to max_new_tokens of each, all sequences together.

        prompts: each text, or token ids; as many as the engine's `batch`. max_new_tokens: of every
        sequence, or of each. on_text sees each piece of a sequence's text as it is decoded,
        on_logits the logits [V] behind each of its new tokens. The slots and the policy's history
        stay as they are afterwards; counters start at zero. Raises WorkloadError for a prompt that
        is empty or, with its answer, longer than the context, and for too many prompts.
        continued: the one prompt follows on what the last generation left in its sequence, all its
        tokens but the newest, which no step has seen; WorkloadError if there is none, or no room.
        room: tokens to make room for, if more than these, so that others can continue them.
        """
        check_number(len(prompts), self.batch, recording=self.runtime.recorder is not None)
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        limits = list(max_new_tokens)
        read = PromptReader(self.tokenizer, self.architecture.source, self.context).ids
        held = self._sequence.held if continued and self._sequence else 0
        ids = [read(*pair, held) for pair in zip(prompts, limits, strict=True)]
        longest = held + max(len(own) + limit for own, limit in zip(ids, limits, strict=True))
        if continued:
            check_continued(self._sequence, len(ids), longest)
        self.runtime.counters.reset()
        stops = frozenset(stop_tokens) | (frozenset() if ignore_eos else eos_of(self.model))
        generation = Generation(
            self._rows_for(max(longest, room), len(ids)),
            Sampler(sampling or Sampling(), self.device, len(ids)),
            self.policies.prefill.config.chunk_tokens,
            stops,
            continued,
            on_logits=on_logits,
        )
        with self.runtime.generating():
            texts = decoded_texts(self.tokenizer, generation.tokens(ids, limits), len(ids), on_text)
        return self._report(texts, ids, generation)

    def _rows_for(self, num_tokens: int, num_sequences: int) -> Rows:
        """Room for sequences; the last ones', and their captured graphs, if it is large enough."""
        if self._sequence is None or self._sequence.capacity < num_tokens:
            self._forget_rows()  # let go of the old ones first
            self._sequence = Sequence(self.model, self.runtime, capacity_for(num_tokens))
        if num_sequences == 1:
            return self._sequence
        if self._batch is None:
            self._batch = Batch(self._sequence, self.batch, masked=self._loaded.takes_masks)
        return self._batch

    def _forget_rows(self) -> None:
        self._sequence = self._batch = None

    def _report(
        self, texts: list[str], prompts: list[list[int]], generation: Generation
    ) -> BatchReport:
        rows = self.runtime.counters.rows()
        # Fused decode's kernels copy, not the copy lane.
        decode_copy_s = None if self.runtime.decode_is_fused else generation.decode_copy_s
        phases = [
            PhaseTotals.of(Phase.PREFILL, rows, generation.prefill_s, generation.prefill_copy_s),
            PhaseTotals.of(Phase.DECODE, rows, sum(generation.step_s), decode_copy_s),
        ]
        each = zip(texts, prompts, generation.continuations, strict=True)
        return BatchReport(
            sequences=[SequenceReport.of(*one) for one in each],
            step_s=generation.step_s,
            phases=phases,
            counters=rows,
            choices=self.runtime.choices(),
            memory=self.runtime.plan.as_dict(),
            environment=environment(self.device),
            notes=[*self.notes, *self._lessons.notes(self.policies.prefill), *self.runtime.notes()],
        )
