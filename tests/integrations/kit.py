"""Code that tests of Fabric share without importing Lightning, which fabrics.py imports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: Importing Lightning on the first case of a rank can take longer than a case may.
TIMEOUT = 180


@contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert all(word in text for word in words), text
