"""Train the demo model's tokenizer and encode the corpora.

A byte-level byte-pair encoding with 4,096 entries: no text is out of vocabulary, and the embedding
stays a small part of a small model. Digits stand alone, so that numbers cost no vocabulary. It is
trained on the training split only. The encoded streams are flat arrays of 16-bit token ids, one
per domain and split, with `<|endoftext|>` after every document.

    python training/tokenizer.py --out .train
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SPECIAL = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
VOCABULARY = 4096
MODEL_LENGTH = 16_384
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# Words keep a leading blank; runs of punctuation, blanks and line ends are pieces of their own, the
# last blank of a run going to the word after it.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+ *|\s+(?!\S)|\s+"


def read_documents(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train(files: list[Path]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    texts = (text for file in files for text in read_documents(file))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=MODEL_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def encode(tokenizer: Tokenizer, file: Path, target: Path) -> dict[str, int]:
    """Write one stream of ids; returns its tokens and the UTF-8 bytes they stand for."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [*read_documents(file)]
    ids: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    stream = np.concatenate(ids)
    np.save(target, stream)
    # An end of text counts as no byte, so bits per byte are not flattered by many documents.
    return {"tokens": int(stream.size), "bytes": sum(len(t.encode()) for t in texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path(".train"))
    out: Path = parser.parse_args().out
    data, folder = out / "data", out / "data/tokenizer"
    data.mkdir(parents=True, exist_ok=True)
    corpora = json.loads((out / "text/corpus.json").read_text())
    tokenizer = train([out / f"text/{c['name']}.train.jsonl" for c in corpora])
    save(tokenizer, folder)
    for corpus in corpora:
        for split in ("train", "heldout"):
            name = f"{corpus['name']}.{split}"
            facts = encode(tokenizer, out / f"text/{name}.jsonl", data / f"{name}.npy")
            corpus[f"{split}_tokens"] = facts["tokens"]
            print(
                f"{name:24} {facts['tokens']:>10,} tokens  "
                f"{facts['bytes'] / facts['tokens']:.2f} bytes/token"
            )
    (data / "corpus.json").write_text(json.dumps(corpora, indent=2) + "\n")


if __name__ == "__main__":
    main()
