"""Blocks and head of a model whose code says nothing about them: found by structure.

Any choice of units gives the same results. It decides how much memory a rank needs, and when ranks communicate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from shardwright.train.errors import UserError


@dataclass(frozen=True)
class Units:
    """The parts of a model that are gathered together.

    Attributes:
        name: of the list of blocks; empty if the model names its blocks itself.
        blocks: in the order in which forward runs them.
        head: what forward uses last, and the embedding if it has the same matrix.
        tied: whether embedding and output layer have the same matrix.
        output: the output layer; None: not found.
    """

    name: str
    blocks: list[nn.Module]
    head: list[nn.Module]
    tied: bool
    output: nn.Module | None = None


def find_units(
    model: nn.Module,
    chosen: str = "",
    classes: Collection[str] = (),
    embedding: nn.Module | None = None,
    output: nn.Module | None = None,
    blocks: list[nn.Module] | None = None,
    key: str = "model.blocks",
    way: str = "",
) -> Units:
    """Return the units of a model.

    Args:
        model: a whole model, which need not have values.
        chosen: the name of the list of blocks; empty: it is found.
        classes: names of the classes of blocks, if they are known.
        embedding: the module of the token embedding, if it is known.
        output: the output layer, if it is known. Default: the last linear layer outside the blocks.
        blocks: the blocks, if they are known.
        key: the key for an error, which sets `chosen`.
        way: another way to name the blocks, for the end of an error.

    Raises:
        UserError: there is no such list, or several fit. The error names the candidates.
    """
    name = ""
    if blocks is None:
        name, blocks = _blocks(model, chosen, classes, key, way)
    inside = {module for block in blocks for module in block.modules()}
    outside = [
        m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))
    ]
    if output is None:
        output = next((m for m in reversed(outside) if isinstance(m, nn.Linear)), None)
    if embedding is None:
        embedding = next((m for m in outside if isinstance(m, nn.Embedding)), None)
    tied = (
        embedding is not None
        and output is not None
        and getattr(output, "weight", None) is getattr(embedding, "weight", object())
    )
    head = [m for m in _after_blocks(model, name) if m in outside and m is not output] if name else []
    if tied and embedding is not None:
        head.insert(0, embedding)
    if output is not None and output in outside:
        head.append(output)
    return Units(name, blocks, list(dict.fromkeys(head)), tied, output)


def _after_blocks(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the norms beside the list of blocks, except those of embeddings."""
    parent = model.get_submodule(name.rpartition(".")[0])
    norms = [
        child
        for child_name, child in parent.named_children()
        if "norm" in type(child).__name__.lower() and "emb" not in child_name.lower()
    ]
    if norms or parent is model:
        return norms
    grandparent = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    return [child for child in grandparent.children() if "norm" in type(child).__name__.lower()]


def _blocks(
    model: nn.Module, chosen: str, classes: Collection[str], key: str, way: str
) -> tuple[str, list[nn.Module]]:
    candidates = _lists(model)
    if chosen:
        if chosen not in candidates:
            raise UserError(
                f"{key}: expected the name of a list of layers ({_in_words(candidates)}), found {chosen!r}"
            )
        return chosen, candidates[chosen]
    fitting = {
        name: blocks
        for name, blocks in candidates.items()
        if not classes or all(type(block).__name__ in classes for block in blocks)
    }
    sizes = {name: sum(p.numel() for b in blocks for p in b.parameters()) for name, blocks in fitting.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])
    if not largest:
        of = f" of {' or '.join(sorted(classes))}" if classes else ""
        raise UserError(
            f"{key}: expected a model with one list of layers{of} (torch.nn.ModuleList), found "
            f"{_in_words(candidates) or 'no list'} in {type(model).__name__}; "
            + (f"set {key} to the name of a list" if candidates else "put the layers into such a list")
            + way
        )
    if len(largest) > 1 and sizes[largest[1]] * 2 > sizes[largest[0]]:
        raise UserError(
            f"{key}: expected one list of layers, found {_in_words(fitting)}; set {key} to one of these names"
        )
    return largest[0], fitting[largest[0]]


def _lists(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Lists of modules with parameters that are not inside such a list, by name."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not name:
            continue
        if any(name.startswith(f"{other}.") for other in lists):
            continue
        blocks = [block for block in module if any(True for _ in block.parameters())]
        if blocks and len(blocks) == len(module):
            lists[name] = blocks
    return lists


def _in_words(lists: dict[str, list[nn.Module]]) -> str:
    return ", ".join(
        f"{name} ({len(blocks)} x {'/'.join(dict.fromkeys(type(b).__name__ for b in blocks))})"
        for name, blocks in lists.items()
    )
