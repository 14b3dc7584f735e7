"""Configurations from a seed in which something is wrong: each is one line of error or a sound configuration.

``SHARDWRIGHT_HOSTILE_SEED`` and ``SHARDWRIGHT_HOSTILE_CONFIGS`` choose other cases and their number.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from shardwright.train.config import load_config
from shardwright.train.errors import UserError
from tests.train.kit.jobs import TINY

VALUES = (
    "0", "-1", "1", "2", "1e999", "nan", "-inf", "9" * 30, "9" * 5000, "0x7fffffffffffffff", "true", '""',
    '"a\\u0000b"', '"../../etc/passwd"', '"/dev/zero"', '"\\ud800"', '"é\\u202e"', "'" + "x" * 5000 + "'", "[]", "[[]]",
    "{}", "1979-05-27", "07:32:00", "{ a = { b = 1 } }", "[1, 'a', {}]", "[" * 300 + "]" * 300,
    '"tests.support.payloads:Payload"', '"os:system"',
)  # fmt: skip


def spoiled(rng: random.Random, text: str) -> bytes:
    """The text with other values, keys, sections, or bytes."""
    lines = text.strip().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(lines))
        kind = rng.randrange(8)
        key = lines[place].partition(" =")[0]
        if kind < 3 and "=" in lines[place]:
            lines[place] = f"{key} = {rng.choice(VALUES)}"
        elif kind == 3:
            lines.insert(place, rng.choice(lines))
        elif kind == 4 and len(lines) > 1:
            del lines[place]
        elif kind == 5:
            lines.insert(
                place, f"{rng.choice(('lr', 'x', 'a.b.c', '__class__', key))} = {rng.choice(VALUES)}"
            )
        elif kind == 6:
            lines[place] = rng.choice(
                ("[[train]]", "[train.steps]", "[checkpoint]", "[", "= 1", "[a.b.c.d]", "#")
            )
        else:
            lines[place] = lines[place][: rng.randrange(len(lines[place]) + 1)]
    data = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.1:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.extensive("hundreds of damaged files")
def test_hostile_configurations(tmp_path: Path) -> None:
    seed = os.environ.get("SHARDWRIGHT_HOSTILE_SEED", "0")
    count = int(os.environ.get("SHARDWRIGHT_HOSTILE_CONFIGS", "300"))
    path, errors, broken = tmp_path / "job.toml", 0, []
    for number in range(count):
        path.write_bytes(spoiled(random.Random(f"{seed}:{number}"), TINY))
        try:
            load_config(path)
        except UserError as error:
            errors += 1
            message = str(error)
            if not message or re.search(r"[\n\r\0]", message) or len(message) > 1500:
                broken.append((number, message[:300]))
        except Exception as error:
            broken.append((number, f"{type(error).__name__}: {error}"[:300]))
    assert broken == []
    assert [each.name for each in tmp_path.iterdir()] == ["job.toml"]
    assert count // 2 < errors < count
