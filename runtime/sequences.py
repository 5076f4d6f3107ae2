"""An engine's sequences, with their captured graphs: the one that a prompt may follow on, and those
that are decoded together.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from residency.runtime.batch import Batch
from residency.runtime.cache_sizes import capacity_for
from residency.runtime.offload import OffloadRuntime
from residency.runtime.sequence import Rows, Sequence


class Sequences:
    """Made when they are first needed, and kept while they are large enough."""

    def __init__(
        self, model: PreTrainedModel, runtime: OffloadRuntime, most: int, *, masked: bool
    ) -> None:
        """most: of sequences decoded together. masked: whether attention masks tell them apart."""
        self._model = model
        self._runtime = runtime
        self._most = most
        self._masked = masked
        self.alone: Sequence | None = None
        self.together: Batch | None = None

    @property
    def all(self) -> list[Sequence | Batch]:
        return [each for each in (self.alone, self.together) if each is not None]

    def rows_for(self, num_tokens: int, num_sequences: int) -> Rows:
        """Room for sequences; the last ones', and their captured graphs, if it is large enough."""
        if self.alone is None or self.alone.capacity < num_tokens:
            self.forget()  # let go of the old ones first
            self.alone = Sequence(self._model, self._runtime, capacity_for(num_tokens))
        if num_sequences == 1:
            return self.alone
        if self.together is None:
            self.together = Batch(self.alone, self._most, masked=self._masked)
        return self.together

    def forget(self) -> None:
        self.alone = self.together = None
