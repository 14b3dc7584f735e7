"""The byte tokenizer as files of Hugging Face: every byte of the UTF-8 text is a token, and its value the id.

The format is that of the library tokenizers: byte-level BPE without merges. Nothing here needs the library.
"""

from __future__ import annotations

from typing import Any


def characters() -> list[str]:
    """For each byte the character by which byte-level BPE writes it.

    Printable characters of Latin-1 stand for themselves. The others take the characters from 256 on, in their order.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(characters())},
            "merges": [],
        },
    }


def tokenizer_config(longest: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, for a model that takes ``longest`` tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
