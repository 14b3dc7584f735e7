"""Layouts that have a name, for ``fully_shard(layout=...)`` and ``[parallel] layout``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.engine.extend.registry import Registry, check_signature

if TYPE_CHECKING:
    from shardwright.engine.layout import Ragged


@dataclass(frozen=True)
class NamedLayout:
    """A layout with a name: the places where parameters are cut.

    Attributes:
        name: by which ``fully_shard`` and configurations know it.
        granule: what stays together on one rank, as ``Ragged`` takes it: "row", "element", a number of rows, or a
            function from a parameter's shape to a number of elements. None: parameters share no memory, each is cut
            along its first dimension.
        summary: what it does, in a sentence.
    """

    name: str
    granule: Any
    summary: str

    def __post_init__(self) -> None:
        rows = isinstance(self.granule, int) and not isinstance(self.granule, bool) and self.granule >= 1
        if not rows and not callable(self.granule) and self.granule not in (None, "row", "element"):
            raise ValueError(
                f'NamedLayout {self.name!r}: expected the granule "row", "element", a number of rows >= 1, a function '
                f"from a shape to a number of elements, or None; found {self.granule!r}"
            )
        if callable(self.granule):
            check_signature(f"NamedLayout {self.name!r}: granule", self.granule, "shape")

    def layout(self) -> Ragged | None:
        """For the engine; None: ``per_parameter``."""
        from shardwright.engine.layout import Ragged

        return None if self.granule is None else Ragged(self.granule)


layouts: Registry[NamedLayout] = Registry(
    "layout",
    "layouts",
    NamedLayout,
    (
        NamedLayout("per_parameter", None, "Each parameter is cut along its first dimension, as in FSDP2."),
        NamedLayout("ragged", "row", "Parameters of a unit share memory, which is cut between rows."),
        NamedLayout("element", "element", "Parameters of a unit share memory, which is cut anywhere."),
    ),
)


def layout_of(layout: str | NamedLayout | Ragged) -> Ragged | None:
    """The layout that ``fully_shard(layout=...)`` asks for; None: ``per_parameter``.

    Raises:
        ValueError: no such name, or no layout.
    """
    from shardwright.engine.layout import Ragged

    if isinstance(layout, Ragged):
        return layout
    if isinstance(layout, NamedLayout):
        return layout.layout()
    if not isinstance(layout, str):
        raise ValueError(f"layout: expected a Ragged or {layouts.expected()}, found {layout!r}")
    return layouts.get(layout).layout()
