"""The figures of the committed results of `python -m benchmarks.peers`, and the picture of the README that shows them.

`python -m benchmarks.peers.committed` draws the picture again. Pages quote these figures, and a test compares them, so
that a new file of results changes everything that names one. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers-torch-2.13-cpu.txt"
PICTURE = ROOT / "docs" / "images" / "engines.svg"
#: Engines in the picture: name in the results, label, colour.
SHOWN = (
    ("FSDP2", "FSDP2", "#90a4ae"),
    ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", "#b0bec5"),
    ("Shardwright zero3, gloo", "Shardwright, gloo", "#7986cb"),
    ("Shardwright zero3", "Shardwright, shared memory", "#3f51b5"),
)


@dataclass(frozen=True)
class Model:
    """The figures of one model, by the names of engines.

    Attributes:
        title: the model in words.
        times: medians of the time of a step, as parts of FSDP2's in the same round.
        between: memory between steps, in MiB a rank.
        most: largest memory in a step, in MiB a rank.
    """

    title: str
    times: dict[str, float] = field(default_factory=dict)
    between: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """A file of results.

    Attributes:
        models: in the order of the file.
        host: by the names of engines, the host's time for a unit as a part of FSDP2's; of the last table of the file.
    """

    models: list[Model]
    host: dict[str, float]


def read(path: Path = RESULTS) -> Committed:
    """Return the figures of a file that `benchmarks.peers` has written. Engines without figures are left out."""
    models: list[Model] = []
    host: dict[str, float] = {}
    title, kind = "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            title, kind = line or title, ""
            continue
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if not kind:
            kind = name
            if kind == "time of a step":
                models.append(Model(title))
        elif kind == "time of a step" and _is_number(cells[1]):
            models[-1].times[name] = float(cells[1])
        elif kind == "MiB a rank" and _is_number(cells[0]):
            models[-1].between[name], models[-1].most[name] = float(cells[0]), float(cells[3])
        elif kind == "host time of a unit" and _is_number(cells[1]):
            host[name] = float(cells[1])
    return Committed(models, host)


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdecimal()


def svg(models: Sequence[Model]) -> str:
    """Return the picture: for each model the time of a step beside the largest memory, FSDP2's being 1."""
    left, width, row, gap = 230, 200, 17, 34
    height = 58 + len(models) * (len(SHOWN) * row + gap)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "  <title>Time and memory of a step with Shardwright, FSDP2 and DeepSpeed on two CPU ranks</title>",
        f'  <rect width="760" height="{height}" rx="8" fill="#fafbfc"/>',
        *(
            f'  <text x="{x}" y="24" font-size="13" font-weight="600" fill="#1f2933">{text}</text>'
            for x, text in ((left, "time of a step"), (left + 270, "largest memory of a step"))
        ),
        f'  <text x="{left}" y="40" fill="#52606d">FSDP2 = 1; shorter is better</text>',
        f'  <text x="{left + 270}" y="40" fill="#52606d">MiB a rank; bars: FSDP2 = 1</text>',
    ]
    y = 58
    for model in models:
        lines.append(f'  <text x="16" y="{y + 12}" font-weight="600" fill="#1f2933">{model.title}</text>')
        y += 18
        for name, label, colour in SHOWN:
            most = model.most[name]
            lines += [
                f'  <text x="{left - 8}" y="{y + 12}" text-anchor="end" fill="#1f2933">{label}</text>',
                *_bar(left, y, width * model.times[name] / 1.5, f"{model.times[name]:.2f}", colour),
                *_bar(left + 270, y, width * most / model.most["FSDP2"] / 2, f"{most:.0f}", colour),
            ]
            y += row
        y += gap - 18
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(x: int, y: int, length: float, figure: str, colour: str) -> list[str]:
    return [
        f'  <rect x="{x}" y="{y + 2}" width="{length:.1f}" height="13" rx="2" fill="{colour}"/>',
        f'  <text x="{x + length + 6:.1f}" y="{y + 12}" fill="#1f2933">{figure}</text>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(svg(read().models), encoding="utf-8")
    print(f"wrote {PICTURE}")
