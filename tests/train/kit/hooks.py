"""The examples of docs/extending.md, a small job for hooks, and documents of one sample each."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
EXAMPLES = {name: code for code, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE, re.DOTALL)}
JOB = """
[run]
device = "cpu"
sample_tokens = 0
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
max_seq_len = 64
[train]
steps = 8
seq_len = 16
global_batch = 4
micro_batch = 2
[validation]
every = 2
batches = 1
[checkpoint]
every = 2
[log]
sinks = []
"""


def documents(file: Path, first: int, stop: int) -> None:
    with file.open("a") as stream:
        stream.writelines(f'{{"text": "{number:03} {"word " * 12}"}}\n' for number in range(first, stop))
