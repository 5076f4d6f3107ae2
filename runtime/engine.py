"""The engine: one model under one combination of policies, ready to generate."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoTokenizer, PreTrainedModel

from residency.policies.errors import CheckpointError, ConfigError, WorkloadError
from residency.policies.step import Phase
from residency.runtime.architecture import Architecture
from residency.runtime.generation import Generation, text_pieces
from residency.runtime.hooks import attach, detach
from residency.runtime.loading import Progress
from residency.runtime.memory import MemoryPlan, row_faults
from residency.runtime.offload import OffloadRuntime, Policies
from residency.runtime.report import PhaseTotals, Report
from residency.runtime.sampling import Sampler, Sampling
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
        progress: Progress | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Raises CheckpointError, ConfigError or CapacityError before any large memory is taken.

        context: most tokens of prompt and answer together; 0 takes the model's own limit.
        notes: lines the report repeats, e.g. which device an automatic choice took.
        """
        self.policies = policies
        self.device = device
        self.notes = list(notes)
        self.architecture = architecture
        self.context = context or architecture.max_context
        plan = plan_memory(architecture, policies, self.context)
        plan.check(device)
        self.tokenizer = _load_tokenizer(architecture.folder)
        self.model: PreTrainedModel = weights.model(device)
        banks = weights.banks(device, progress)
        self.runtime = OffloadRuntime(banks, policies, plan, device)
        attach(self.model, architecture.expert_modules, self.runtime)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of banks, slots and model; the engine cannot be used afterwards."""
        detach(self.model, self.architecture.expert_modules)
        del self.model, self.runtime

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
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
            self.model,
            self.runtime,
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

    def _pieces(self, generation: Generation, ids: list[int], max_new: int) -> Iterator[str]:
        tokens = generation.tokens(ids, max_new)
        if self.tokenizer is not None:
            return text_pieces(self.tokenizer, tokens)
        return ("" for _ in tokens)

    def _encode(self, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
        if max_new_tokens < 1:
            raise WorkloadError(f"workload.max_new_tokens={max_new_tokens}: it must be at least 1")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise CheckpointError(
                    f"{self.architecture.folder}: no tokenizer there, so text cannot be read"
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
        copy_s = (generation.prefill_copy_s, generation.decode_copy_s)
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
            notes=self.notes,
        )


def plan_memory(architecture: Architecture, policies: Policies, context: int) -> MemoryPlan:
    """Raises ConfigError for slots or groups that the model cannot use."""
    space = architecture.space
    prefill = policies.prefill.config
    num_slots = policies.cache.num_slots(space)
    for fault in row_faults(space, num_slots, prefill.groups):
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


def environment(device: torch.device) -> dict[str, str]:
    """The machine and the versions behind a result."""
    names = ("residency", "torch", "transformers")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "device": str(device),
        "device_name": gpu or platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    } | {name: version(name) for name in names}


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where there is none and prompts must be token ids."""
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason}") from error
