"""Write the trained model as a checkpoint folder, and pack it into archives of limited size."""

import copy
import json
import tarfile
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3MoeForCausalLM

SHARD = "7MB"
ARCHIVE_BYTES = 15_000_000


def write(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A bf16 copy of the model with its tokenizer, in the hub's layout."""
    small = copy.deepcopy(model).to(torch.bfloat16)
    small.set_experts_implementation("eager")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    small.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[0], do_sample=True, temperature=0.8
    )
    folder.mkdir(parents=True, exist_ok=True)
    small.save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.save_pretrained(folder)
    forget_machine(folder / "tokenizer_config.json")
    for file in folder.iterdir():
        file.chmod(0o644)


def forget_machine(file: Path) -> None:
    """Drop the notes on how this very copy of the tokenizer was loaded."""
    facts = json.loads(file.read_text())
    kept = {k: v for k, v in facts.items() if k not in ("is_local", "local_files_only")}
    file.write_text(json.dumps(kept, indent=2) + "\n")


def pack(folder: Path, out: Path, name: str) -> list[Path]:
    """`NAME-a.tar`, `NAME-b.tar` and so on; unpack all of them into one folder."""
    groups: list[list[Path]] = [[]]
    size = 0
    for file in sorted(folder.iterdir()):
        if groups[-1] and size + file.stat().st_size > ARCHIVE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    archives = []
    for letter, files in zip("abcdefgh", groups, strict=False):
        archives.append(out / f"{name}-{letter}.tar")
        with tarfile.open(archives[-1], "w") as tar:
            for file in files:
                tar.add(file, arcname=file.name)
    return archives
