"""The work of kernels: floating-point operations, and bytes that go through the device's memory.

A recorded kernel has the name of its operation, the shapes of its first tensors and the bytes of all of them. The rules
here say which of these bytes move.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from shardwright.planner.program import ALL_PAIRS, CROSSING, Kernel

Kind = Literal["products", "attention", "memory", "optimizer", "communication", "copies", "nothing"]
ITEM = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "int16": 2,
    "float32": 4, "int32": 4, "float64": 8, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
        kind: what limits it.
        flops: floating-point operations of products and of attention; a multiplication and an addition are two.
        nbytes: bytes read and written.
        sizes: of a product the batch, rows, columns and the length of the sums; of attention the batch and heads, the
            lengths of queries and of keys, and the width of a head.
        launches: kernels of the device, at least one.
    """

    kind: Kind
    flops: float
    nbytes: float
    sizes: tuple[int, ...] = ()
    launches: int = 1


NOTHING = Work("nothing", 0, 0, launches=0)
#: Operations that take memory and run no kernel.
_TAKES_MEMORY = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
#: These operations read as many bytes of a table as their results have, and no others.
_LOOKS_UP = re.compile(r"embedding$|^index|^gather|^take|^_index|^nll_loss_forward")
#: Operations that only write.
_FILLS = frozenset(
    {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange"}
)
_DRAWS = re.compile(r"normal|uniform|bernoulli|random|dropout")
#: Bytes that an update moves for each byte of the tensors in its record: it writes some of those that it reads.
_OF_UPDATES = {"_fused_adamw_": 28 / 16, "_fused_adam_": 28 / 16, "_fused_sgd_": 12 / 8}


def work_of(kernel: Kernel) -> Work:
    """Return the work of a kernel."""
    name, shapes = kernel.name, kernel.shapes
    if name.startswith("c10d."):
        return Work("communication", 0, kernel.nbytes)
    if name.startswith(CROSSING):
        return Work("copies", 0, kernel.nbytes / 2)  # its record has both tensors
    if name in _TAKES_MEMORY or not kernel.nbytes:
        return NOTHING
    if (sizes := _sizes_of_product(name, shapes)) is not None and all(sizes):
        return Work("products", 2 * math.prod(sizes), _bytes_of_product(sizes, kernel), sizes)
    if "attention" in name and (found := _attention(name, kernel)) is not None and found.flops:
        return found
    if name in _OF_UPDATES:
        return Work("optimizer", 0, kernel.nbytes * _OF_UPDATES[name])
    nbytes: float = kernel.nbytes
    first = math.prod(shapes[0]) * ITEM.get(kernel.dtype, 4) if shapes else 0
    if _LOOKS_UP.search(name):
        out = math.prod(shapes[-1]) * ITEM.get(kernel.dtype, 4)
        nbytes = 2 * min(out, kernel.nbytes)
    elif name == "embedding_dense_backward":
        nbytes = kernel.nbytes + first  # the gradient is filled first, and then added to
    elif name == "nll_loss_backward":
        nbytes = kernel.nbytes / 2  # it reads the targets alone
    elif name in _FILLS or (_DRAWS.search(name) and name.endswith("_")):
        nbytes = first if name.endswith("_") else kernel.nbytes
    elif name.startswith("_foreach_") and name.endswith("_") and name != "_foreach_copy_":
        nbytes = kernel.nbytes * 1.5  # a half of the tensors is written, too
    elif name.endswith("_") and name not in ("copy_", "_foreach_copy_"):
        nbytes = kernel.nbytes + first  # what it changes is read and written
    return Work("memory", 0, nbytes)


def _sizes_of_product(name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int, int, int] | None:
    """Return the sizes of a product: batch, rows, columns and the length of the sums. None if it is none."""
    if name in ("mm", "_scaled_mm", "_int_mm") and len(shapes) > 1:
        (m, k), (_, n) = shapes[:2]
        return 1, m, n, k
    if name in ("addmm", "addmm_") and len(shapes) > 2:
        (m, k), (_, n) = shapes[1:3]
        return 1, m, n, k
    if name in ("bmm", "baddbmm", "baddbmm_"):
        of = shapes[:2] if name == "bmm" else shapes[1:3]
        if len(of) == 2:
            (b, m, k), (_, _, n) = of
            return b, m, n, k
    if name in ("_grouped_mm", "_scaled_grouped_mm") and len(shapes) > 1:
        one, other = shapes[:2]
        if len(one) == 2:  # rows of all groups; of a weight's gradient, the rows are summed over
            return 1, one[0], other[-1], one[1]
        if len(one) == 3:
            return one[0], one[1], other[-1], one[2]
    if name in ("mv", "dot") and len(shapes[0]) == 2:
        return 1, shapes[0][0], 1, shapes[0][1]
    return None


def _bytes_of_product(sizes: tuple[int, int, int, int], kernel: Kernel) -> float:
    b, m, n, k = sizes
    item = ITEM.get(kernel.dtype, 2)
    return max(kernel.nbytes, b * (m * k + k * n + m * n) * item)


def _attention(name: str, kernel: Kernel) -> Work | None:
    """Return the work of fused attention: of the pairs below the diagonal if it is causal, else of all pairs.

    None: the shapes are not those of fused attention. Its formula has products of its own.
    """
    shapes = kernel.shapes
    backward = name.endswith("backward")
    of = shapes[1:3] if backward else shapes[:2]
    if len(of) < 2 or len(of[0]) != 4:
        return None
    (batch, heads, queries, width), keys = of[0], of[1][2]
    halves = queries == keys and not name.startswith(ALL_PAIRS)
    pairs = queries * keys / (2 if halves else 1)
    flops = 4 * batch * heads * pairs * width * (2.5 if backward else 1)
    return Work("attention", flops, kernel.nbytes, (batch * heads, queries, keys, width))
