"""The engine: one model under one combination of policies, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from residency.runtime.architecture import Architecture
from residency.runtime.faults import Point, Work
from residency.runtime.generation import Generation, decoded_texts, eos_of
from residency.runtime.hooks import add_experts
from residency.runtime.kept import Kept, check_continued
from residency.runtime.lessons import Lessons
from residency.runtime.loaded import Loaded
from residency.runtime.loading import Progress
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.planner import Planner
from residency.runtime.prompts import PromptReader, check_number
from residency.runtime.recorder import RouteRecorder
from residency.runtime.replacements.seam import Seam
from residency.runtime.report import BatchReport, Report
from residency.runtime.routing import Routing
from residency.runtime.sampling import Forced, Sampler, Sampling
from residency.runtime.sequence import Sequence
from residency.runtime.sequences import Sequences
from residency.runtime.standing import Standing
from residency.runtime.state_file import save_state
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
        snapshots: int = 0,
        routing: Routing | None = None,
        kernels: bool = True,
        allow_pageable: bool = False,
        verify_banks: bool = False,
        progress: Progress | None = None,
        notes: Ids[str] = (),
        fixed_costs: Path | None = None,
    ) -> None:
        """Raises CheckpointError, ConfigError or CapacityError before any large memory is taken.

        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        batch: most sequences that are decoded together. snapshots: that a conversation keeps.
        routing: replaces the model's routes; its tables lie on `device`.
        kernels: compute experts by kernels where the device has them, else in plain torch.
        allow_pageable: run with banks that could not be pinned, more slowly and without kernels.
        verify_banks: at the end of each generation, compare them with what was loaded.
        notes: lines the report repeats, e.g. which device an automatic choice took.
        fixed_costs: a folder of copied cost profiles; runtimes begin with these and keep none.
        """
        self.device = device
        self.notes = list(notes)
        self.architecture = architecture
        self.context = context or architecture.max_context
        self.routing = routing
        self.made_up = weights.made_up
        planner = Planner(architecture, weights, device, self.context, batch, snapshots)
        asked, (policies, plan) = policies, planner.fitted(policies)
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
            told = self.made_up, routing is not None, fixed_costs
            self._lessons = Lessons(self.model, architecture, device, *told)
            planner.settle(plan)
            self._standing = Standing(architecture, loaded, self._lessons, planner, routing)
            self._standing.install(policies, plan, planner.notes(asked, plan))

    @property
    def runtime(self) -> OffloadRuntime:
        return self._standing.runtime

    @property
    def sequences(self) -> Sequences:
        return self._standing.sequences

    @property
    def batch(self) -> int:
        """Most sequences that are decoded together."""
        return self._standing.planner.batch

    @property
    def snapshots(self) -> int:
        """Most of them that a conversation keeps."""
        return self._standing.planner.snapshots

    @property
    def policies(self) -> Policies:
        return self.runtime.policies

    def rebuild(
        self, policies: Policies, batch: int | None = None, snapshots: int | None = None
    ) -> None:
        """Stand a fresh runtime over the same banks and model, as if nothing had run on them yet.

        batch, snapshots: as the engine takes them; None leaves one as it is. Raises ConfigError,
        with the old runtime in place, or CapacityError, with none: nothing but another `rebuild`
        works then.
        """
        self._standing.rebuild(policies, batch, snapshots)

    @contextmanager
    def reconfigured(self, policies: Policies) -> Iterator[None]:
        """Inside, the same banks and model run under other policies; the old ones return after.

        Slots and policies' memories start empty both times. Raises ConfigError or CapacityError
        when the new policies cannot be had; the old ones run on then.
        """
        with self._standing.reconfigured(policies):
            yield

    def resize(self, slots: int | str) -> None:
        """Another number of slots, as `cache.slots` says it, without loading anything anew.

        The policy's history, its highest-ranking residents, as many as fit, what the last
        generation left to continue and all counts stay; graphs are captured anew. Raises
        ConfigError for a number that the model or the policy cannot use, CapacityError where memory
        does not suffice; all is as before then.
        """
        self._standing.resize(slots)

    @property
    def sequence(self) -> Sequence | None:
        """The one that a prompt may follow on, if there is one."""
        return self.sequences.alone

    def keep(self) -> Kept:
        """What may be continued now, to be put back later. Raises WorkloadError for nothing."""
        return Kept(self.sequence)

    def put_back(self, kept: Kept) -> None:
        """The next prompt may follow on `kept`. Raises WorkloadError if its sequence is gone."""
        kept.put_back(self.sequence)

    def record_routes(self) -> RouteRecorder:
        """From now on, up to one context of tokens, note where each token is routed."""
        self.sequences.forget()  # a graph captured before would not record
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
        self._standing.uninstall()
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
        on_prefilled: Callable[[], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        answer: Ids[int] = (),
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
            on_prefilled=on_prefilled,
            interrupted=interrupted,
            answer=answer,
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
        on_prefilled: Callable[[], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        answer: Ids[int] = (),
        continued: bool = False,
        room: int = 0,
    ) -> BatchReport:
        """Prefill each prompt, then decode up to max_new_tokens of each, all sequences together.

        prompts: each text, or token ids; as many as the engine's `batch`. max_new_tokens: of every
        sequence, or of each. on_text sees each piece of a sequence's text as it is decoded,
        on_logits the logits [V] behind each of its new tokens. The slots and the policy's history
        stay as they are afterwards; counters start at zero. Raises WorkloadError for a prompt that
        is empty or, with its answer, longer than the context, and for too many prompts.
        on_prefilled, interrupted: as `Generation` takes them. answer: of the one prompt, known
        already: these tokens are taken, to the last, whatever the logits.
        continued: the one prompt follows on what the last generation left in its sequence, all its
        tokens but the newest, which no step has seen; WorkloadError if there is none, or no room.
        room: tokens to make room for, if more than these, so that others can continue them.
        """
        check_number(len(prompts), self.batch, recording=self.runtime.recorder is not None)
        if answer:
            max_new_tokens, stop_tokens, ignore_eos = len(answer), (), True
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        limits = list(max_new_tokens)
        read = PromptReader(self.tokenizer, self.architecture.source, self.context).ids
        held = self.sequence.held if continued and self.sequence else 0
        ids = [read(*pair, held) for pair in zip(prompts, limits, strict=True)]
        longest = held + max(len(own) + limit for own, limit in zip(ids, limits, strict=True))
        if continued:
            check_continued(self.sequence, len(ids), longest)
        self.runtime.counters.reset()
        stops = frozenset(stop_tokens) | (frozenset() if ignore_eos else eos_of(self.model))
        generation = Generation(
            self.sequences.rows_for(max(longest, room), len(ids)),
            Forced(answer, self.device)
            if answer
            else Sampler(sampling or Sampling(), self.device, len(ids)),
            self.policies.prefill.config.chunk_tokens,
            stops,
            continued,
            on_logits=on_logits,
            on_prefilled=on_prefilled,
            interrupted=interrupted,
        )
        with self.runtime.generating():
            texts = decoded_texts(self.tokenizer, generation.tokens(ids, limits), len(ids), on_text)
        notes = [*self.notes, *self._standing.sizing, *self._lessons.notes(self.policies.prefill)]
        notes += self.runtime.notes()
        return BatchReport.of(self.runtime, generation, texts, ids, notes)
