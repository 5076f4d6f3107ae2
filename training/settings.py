"""The numbers that shape a training run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Everything that shapes a run; the smoke run only has smaller numbers."""

    minutes: float = 6.5
    passes: float = 40.0
    tokens_a_step: int = 65_536
    short: int = 1024
    long: int = 8192
    long_from: float = 0.85
    warm_up: float = 0.02
    peak_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    balance: float = 0.01
    router_size: float = 1e-4
    heldout_windows: int = 48
    final_windows: int = 10_000
    evaluate_every: float = 0.05
    sample_tokens: int = 120
    seed: int = 20


SMOKE = Settings(
    minutes=0.4,
    tokens_a_step=4096,
    short=256,
    long=4096,
    heldout_windows=4,
    final_windows=4,
    evaluate_every=0.2,
    sample_tokens=24,
)
