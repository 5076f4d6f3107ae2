"""The engine: one model under one combination of policies, ready to generate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from residency.runtime.architecture import Architecture
from residency.runtime.batch import Batch
from residency.runtime.batch_cache import check_batched
from residency.runtime.cache_sizes import capacity_for
from residency.runtime.generation import Generation, decoded_texts, eos_of
from residency.runtime.hooks import add_experts, attach, detach
from residency.runtime.kept import Kept, check_continued
from residency.runtime.lessons import Lessons
from residency.runtime.loaded import Loaded
from residency.runtime.loading import Progress
from residency.runtime.memory import MemoryPlan
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.planner import Planner
from residency.runtime.prompts import PromptReader, check_number
from residency.runtime.recorder import RouteRecorder
from residency.runtime.replacements.seam import Seam
from residency.runtime.report import BatchReport, Report
from residency.runtime.resizing import resize
from residency.runtime.routing import Routing
from residency.runtime.sampling import Sampler, Sampling
from residency.runtime.sequence import Rows, Sequence
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
        progress: Progress | None = None,
        notes: Ids[str] = (),
    ) -> None:
        """Raises CheckpointError, ConfigError or CapacityError before any large memory is taken.

        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        batch: most sequences that are decoded together.
        routing: replaces the model's routes; its tables lie on `device`.
        kernels: compute experts by kernels where the device has them, else in plain torch.
        allow_pageable: run with banks that could not be pinned, more slowly and without kernels.
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
        self._planner = Planner(architecture, weights, device, self.context, batch)
        asked, (policies, plan) = policies, self._planner.fitted(policies)
        plan.check(device)
        self._loaded = Loaded(
            architecture,
            weights,
            device,
            kernels=kernels,
            allow_pageable=allow_pageable,
            progress=progress,
            mapped_tables=plan.mapped_tables,
        )
        self.model, self.banks = self._loaded.model, self._loaded.banks
        self.tokenizer, self.load_s = self._loaded.tokenizer, self._loaded.load_s
        self._loaded.fuse_layers(
            Seam(position_of=lambda: self.runtime.position, add_experts=add_experts)
        )
        self.notes += self._loaded.notes
        self._lessons = Lessons(self.model, architecture, device, self.made_up, routing is not None)
        self._planner.settle(plan)
        self._install(policies, plan, self._planner.notes(asked, plan))

    @property
    def policies(self) -> Policies:
        return self.runtime.policies

    def _install(self, policies: Policies, plan: MemoryPlan, sizing: Ids[str] = ()) -> None:
        """Stand a runtime under these policies behind the model's experts.

        sizing: lines for a report, on the number of slots.
        """
        self._sizing = sizing
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
        old = self.policies, self.runtime.plan, self._sizing
        self._planner.plan(policies)  # refuses what no memory could mend
        self._uninstall()
        try:
            asked, (policies, plan) = policies, self._planner.fitted(policies)
            plan.check(self.device, loaded=True)
            self._install(policies, plan, self._planner.notes(asked, plan))
            yield
        finally:
            if hasattr(self, "runtime"):
                self._uninstall()
            self._install(*old)

    def resize(self, slots: int | str) -> None:
        """Another number of slots, as `cache.slots` says it, without loading anything anew.

        The policy's history, its highest-ranking residents, as many as fit, what the last
        generation left to continue and all counts stay; graphs are captured anew. Raises
        ConfigError for a number that the model or the policy cannot use, CapacityError where memory
        does not suffice; all is as before then.
        """
        rows = [each for each in (self._sequence, self._batch) if each is not None]
        self._sizing = resize(self.runtime, self._planner, rows, slots) or self._sizing

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
        texts = decoded_texts(self.tokenizer, generation.tokens(ids, limits), len(ids), on_text)
        self.runtime.check()
        notes = [*self.notes, *self._sizing, *self._lessons.notes(self.policies.prefill)]
        notes += self.runtime.notes()
        return BatchReport.of(self.runtime, generation, texts, ids, notes)

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
