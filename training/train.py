"""Train the demo model on one GPU inside a fixed time.

Learning rate and window length are functions of progress, the larger of the share of the time spent
and the share of the passes over the corpus made. So the decay always ends, whether the machine is
fast or slow. Most of the run reads short windows; the last part reads long ones, at a low learning
rate, so that long prompts work. The corpus is small and is read many times, which dropout and
weight decay make bearable; the weights kept are the best ones by held-out loss in the last part.

    python training/train.py --minutes 6.5
"""

import argparse
import copy
import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import export
import measure
import report
import torch
import transformers
from demo_model import Trainee, build
from settings import SMOKE, Settings
from streams import Mixture
from transformers import AutoTokenizer


class Run:
    """One training run: the model, its optimiser, and how far it has come."""

    def __init__(self, settings: Settings, data: Path, compiled: bool) -> None:
        self.settings, self.data = settings, data
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
        end = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.model = build(len(self.tokenizer), end).to(self.device)
        self.mixture = Mixture(data, self.device, settings.seed)
        self.optimizer = self.make_optimizer()
        self.trainee = self.warmed(compiled)
        self.seen = self.steps = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, torch.Tensor] = {}
        self.best_loss = math.inf

    def make_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)

    def warmed(self, compiled: bool) -> Trainee:
        """Compile both shapes before the clock starts, or say loudly that it did not work."""
        self.compiled = compiled
        trainee = Trainee(self.model, self.settings.dropout, compiled)
        start = time.monotonic()
        try:
            for length in (self.settings.short, self.settings.long):
                self.gradients(trainee, length)
        except Exception as error:
            if not compiled:
                raise
            print(f"\n{'!' * 80}\nCOMPILATION FAILED, TRAINING EAGERLY: {error!r}\n{'!' * 80}\n")
            torch._dynamo.reset()
            return self.warmed(False)
        self.optimizer.zero_grad(set_to_none=True)
        print(f"warm-up {time.monotonic() - start:.0f} s, compiled: {compiled}", flush=True)
        return trainee

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def gradients(self, trainee: Trainee, length: int) -> torch.Tensor:
        """Adds the gradients of one batch; returns cross-entropy and balance."""
        ids, targets = self.mixture.batch(max(self.settings.tokens_a_step // length, 1), length)
        with self.autocast():
            loss, balance, size = trainee.losses(ids, targets)
            total = loss + self.settings.balance * balance + self.settings.router_size * size
        torch.autograd.backward(total)
        return torch.stack([loss.detach(), balance.detach()])

    def rate(self, progress: float) -> float:
        rise = min(progress / self.settings.warm_up, 1.0)
        fall = (1.0 - progress) / (1.0 - self.settings.warm_up)
        return self.settings.peak_rate * max(min(rise, fall), 0.0)

    def step(self, progress: float) -> torch.Tensor:
        late = progress >= self.settings.long_from
        losses = self.gradients(self.trainee, self.settings.long if late else self.settings.short)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen += self.settings.tokens_a_step
        self.steps += 1
        return losses

    def progress(self, elapsed: float) -> float:
        passes = self.seen / float(self.mixture.sizes.sum())
        return max(elapsed / (60.0 * self.settings.minutes), passes / self.settings.passes)

    def evaluate(self, progress: float) -> None:
        """Held-out loss by domain; remembers the weights if they are the best of the last part."""
        s = self.settings
        with self.autocast():
            losses = measure.domain_losses(self.model, self.data, s.short, s.heldout_windows, 16)
        mean = sum(losses.values()) / len(losses)
        self.history.append({"progress": round(progress, 4), "mean": mean, **losses})
        each = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        print(f"held out {progress:5.1%}  mean {mean:.4f}  {each}", flush=True)
        if progress >= s.long_from and mean < self.best_loss:
            self.best_loss = mean
            self.best = copy.deepcopy(self.model.state_dict())

    def train(self, out: Path) -> float:
        """The loop; returns its seconds."""
        start = spoken = time.monotonic()
        due, halfway = self.settings.evaluate_every, False
        while (progress := self.progress(time.monotonic() - start)) < 1.0:
            losses = self.step(progress)
            # The device runs ahead of Python; waiting now and then keeps the clock honest.
            if self.steps % 20 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
            if time.monotonic() - spoken > 5.0:
                spoken = time.monotonic()
                self.speak(progress, losses.tolist(), spoken - start)
            if progress >= due:
                self.evaluate(progress)
                due += self.settings.evaluate_every * (1.0 if due < 0.85 else 0.5)
            if progress >= 0.5 and not halfway:
                halfway = True
                self.save(out, "half")
        self.evaluate(1.0)
        return time.monotonic() - start

    def speak(self, progress: float, losses: list[float], elapsed: float) -> None:
        if not math.isfinite(losses[0]):
            raise FloatingPointError(f"the loss is {losses[0]} at step {self.steps}")
        print(
            f"{progress:5.1%}  step {self.steps:6}  loss {losses[0]:.4f}  balance {losses[1]:.3f}  "
            f"rate {self.rate(progress):.2e}  {self.seen / elapsed / 1e3:,.0f} k tokens/s",
            flush=True,
        )

    def facts(self, seconds: float) -> dict[str, Any]:
        """What metrics.json says about the run itself."""
        cuda = self.device.type == "cuda"
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "tokens_seen": self.seen,
            "passes": self.seen / float(self.mixture.sizes.sum()),
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "compiled": self.compiled,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "settings": vars(self.settings),
            "history": self.history,
        }

    def save(self, out: Path, name: str) -> Path:
        """Write and pack a checkpoint; the folder lies outside `out`, which holds few files."""
        folder = Path(tempfile.mkdtemp(prefix="demo-")) / name
        export.write(self.model, self.tokenizer, folder)
        sizes = [a.stat().st_size for a in export.pack(folder, out, name)]
        print(f"saved {name}: archives of {sizes} bytes", flush=True)
        return folder


def choose(options: argparse.Namespace) -> Settings:
    base = SMOKE if options.smoke else Settings()
    given = {
        n: getattr(options, n) for n in ("minutes", "passes", "peak_rate", "dropout", "balance")
    }
    return Settings(**{**vars(base), **{n: v for n, v in given.items() if v is not None}})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on one GPU.")
    parser.add_argument("--minutes", type=float, help="training time, start and end not counted")
    parser.add_argument("--passes", type=float, help="most passes over the corpus")
    parser.add_argument("--peak-rate", type=float)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--balance", type=float, help="weight of the load-balancing loss")
    parser.add_argument("--data", type=Path, default=Path(".train/data"))
    parser.add_argument("--out", type=Path, default=Path(".train/run"), help="unless $OUT is set")
    parser.add_argument("--smoke", action="store_true", help="a tiny run for a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    out = Path(os.environ.get("OUT") or options.out)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(choose(options), options.data, not options.eager)
    print(
        f"{sum(p.numel() for p in run.model.parameters()):,} parameters on {run.device}; "
        f"{run.mixture.sizes.sum():,} tokens",
        flush=True,
    )
    seconds = run.train(out)
    if run.best:
        run.model.load_state_dict(run.best)
    earlier = min((h["mean"] for h in run.history), default=math.inf)
    if earlier < run.best_loss:
        print(f"note: held-out loss was lower earlier, {earlier:.4f} against {run.best_loss:.4f}")
    folder = run.save(out, "demo")
    for half in out.glob("half-*.tar"):
        half.unlink()
    if "OUT" not in os.environ:
        shutil.copytree(folder, out / "demo", dirs_exist_ok=True)
    ids, _ = run.mixture.batch(1, run.settings.short)
    facts, text = report.measured(folder, options.data, run.settings, ids)
    facts |= run.facts(seconds)
    (out / "metrics.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "samples.txt").write_text(text)
    print(text)
    print(
        json.dumps({k: v for k, v in facts.items() if k.startswith(("heldout", "load_m", "adj"))})
    )


if __name__ == "__main__":
    main()
