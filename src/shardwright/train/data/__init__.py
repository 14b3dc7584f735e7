"""Text as tokens, and the order in which a run sees them: see `documents`, `tokenizers`, `cache`, `corpus`, `order`.

Names are imported at first use, so that the processes that make tokens start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.train.data.corpus import Corpus, decode, encode, load_corpus
    from shardwright.train.data.order import SampleOrder

__all__ = ["Corpus", "SampleOrder", "decode", "encode", "load_corpus"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "order" if name == "SampleOrder" else "corpus"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
