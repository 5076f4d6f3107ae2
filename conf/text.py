"""A composed config as text that reads back as it is."""

from __future__ import annotations

import json
import re
from typing import Any

from omegaconf import OmegaConf

from residency.conf.schema import escaped

# Line breaks to YAML, which its writer leaves unescaped and its reader folds into spaces.
UNICODE_BREAKS = frozenset("\x85\u2028\u2029")
UNPRINTABLE = "[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"


def to_yaml(tree: dict[str, Any]) -> str:
    """YAML that Hydra reads back; JSON, which is YAML too, where that needs more escapes."""
    text = OmegaConf.to_yaml(OmegaConf.create(escaped(tree)))
    if not UNICODE_BREAKS.intersection(text):
        return text
    text = json.dumps(escaped(tree), indent=1, ensure_ascii=False)
    return re.sub(UNPRINTABLE, lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
