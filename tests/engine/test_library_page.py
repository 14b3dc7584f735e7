"""The examples of docs/library.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support import multirank

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@multirank(2)
def test_examples_of_the_library_page_run(rank: int, world_size: int, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 7
    names = {"__name__": "library"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world_size))
        os.chdir(tmp_path)
        for example in examples:
            exec(compile(example, "library.md", "exec"), names)
    assert (tmp_path / "step-100" / "index.json").is_file()
