"""`shardwright layout`: what it prints for a configuration, without ranks, and how it refuses mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cli import main
from shardwright.engine.layout import Ragged, plan
from shardwright.train.commands.layouts import alike, units_of
from shardwright.train.models.native.llama import Llama
from shardwright.train.parallel.engines import engine_of
from shardwright.train.parallel.engines.base import Ranks
from shardwright.train.parallel.engines.units import UnitEngine
from tests.train.kit.jobs import TINY, config_file, tiny

Capture = pytest.CaptureFixture[str]
ROW = re.compile(
    r"^\s*([\d,]+)?\s+(per_parameter|Ragged\(.*?\))\s+(\d+)\s+([\d,.]+)\s+([\d,.]+)%\s+([\d,.]+)\s*$"
)


@pytest.fixture
def job(tmp_path: Path) -> str:
    return str(config_file(tmp_path))


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(["layout", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def rows_of(text: str) -> list[tuple[str, ...]]:
    """(segments, MiB, padding, balance) with ranks and layout before them, of every row in the text."""
    rows, ranks = [], ""
    for line in text.splitlines():
        if found := ROW.match(line):
            ranks = found[1] or ranks
            rows.append((ranks, *found.groups()[1:]))
    return rows


@pytest.mark.parametrize("columns", ["80", "120"])
def test_units_layouts_and_ranks_fit_the_width(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, job: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = printed(capsys, job, "--world-size", "2,1024,4096")
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "layers.0..1 (2 units): 9 parameters, 0.035 MiB" in text
    assert "norm, output: 2 parameters" in text and "tok_embeddings: 1 parameter," in text
    kinds = ["per_parameter", 'Ragged("row")', 'Ragged("element")', "Ragged(32)"]
    per_unit = [(ranks, kind) for ranks in ("2", "1,024", "4,096") for kind in kinds]
    assert [row[:2] for row in rows_of(text)] == 3 * per_unit


def test_figures_are_the_planner_s(capsys: Capture, job: str) -> None:
    text = printed(
        capsys, job, "--world-size", "24", "--model.dim", "2048", "--parallel.param_dtype", "bfloat16"
    )
    shapes = [
        (2048, 2048),
        (1024, 2048),
        (1024, 2048),
        (2048, 2048),
        (64, 2048),
        (2048, 64),
        (64, 2048),
        (2048,),
    ]
    dtypes = [(torch.float32, torch.bfloat16)] * 9
    for row, kind in zip(
        rows_of(text)[4:8], ("per_parameter", "ragged", Ragged("element"), Ragged(32)), strict=True
    ):
        expected = plan([*shapes, (2048,)], 24, kind, dtypes=dtypes)
        mib = 4 * expected.shard_numel / 2**20
        figures = (f"{mib:.3f}", f"{100 * expected.padding:.2f}", f"{expected.balance:.3f}")
        assert row == ("24", str(expected.kind), str(len(expected.segments)), *figures)


def test_the_largest_preset_is_planned_without_memory(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "405B"\n')
    assert "layers.0..125 (126 units): 9 parameters, 12,160.125 MiB" in printed(
        capsys, str(path), "--world-size", "64"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_those_that_training_makes(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    calls: list[list[nn.Module]] = []

    def record(modules: nn.Module | list[nn.Module], **options: Any) -> Any:
        calls.append(modules if isinstance(modules, list) else [modules])
        return modules

    monkeypatch.setattr(sw, "fully_shard", record)
    monkeypatch.setattr(nn.Embedding, "set_unshard_in_backward", lambda *_: None, raising=False)
    config = tiny(model={"tied_embeddings": tied, "n_layers": 3}, parallel={"engine": "shardwright"})
    model = Llama(config.model.shape())
    UnitEngine.spread(engine_of(config.parallel), model, Ranks(None, torch.device("cpu")))  # type: ignore[arg-type]
    owned: set[nn.Parameter] = set()
    expected = []
    for modules in calls:
        own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in owned)
        owned |= own.keys()
        expected.append(tuple(tuple(p.shape) for p in own))
    assert [unit.shapes for unit in units_of(model)] == [shapes for shapes in expected if shapes]
    head = "tok_embeddings, norm, output" if tied else "norm, output"
    first = [] if tied else ["tok_embeddings"]
    assert [name for name, _ in alike(units_of(model))] == [*first, "layers.0..2 (3 units)", head]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("JOB", "layout: expected --world-size N[,N...], found none; SEE"),
        ("--world-size 2", "layout: expected CONFIG.toml, found none; SEE"),
        ("JOB --world-size 0", "layout: argument --world-size: LIST, found '0'; SEE"),
        ("JOB --world-size 64,-1", "layout: argument --world-size: LIST, found '64,-1'; SEE"),
        ("JOB --world-size 64,", "layout: argument --world-size: LIST, found '64,'; SEE"),
        ("JOB --world-size many", "layout: argument --world-size: LIST, found 'many'; SEE"),
        ("JOB --worldsize 2", "unknown option --worldsize; did you mean --world-size?"),
        ("JOB more --world-size 2", "layout: unexpected argument 'more'; SEE"),
        ("none.toml --world-size 2", "none.toml: expected a configuration file, found nothing there PLACE"),
        ("JOB --world-size 2 --model.dmi 4", "command line: unknown key model.dmi; did you mean model.dim?"),
    ],
)
def test_mistake_is_one_line_and_status_2(capsys: Capture, job: str, arguments: str, expected: str) -> None:
    assert main(["layout", *arguments.replace("JOB", job).split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = expected.replace("SEE", "see shardwright layout --help")
    expected = expected.replace("PLACE", f"({Path('none.toml').absolute()})")
    assert (
        captured.err == f"error: {expected.replace('LIST', 'expected integers >= 1, separated by commas')}\n"
    )


def test_a_wrong_configuration_is_refused_as_in_training(capsys: Capture, tmp_path: Path) -> None:
    path = config_file(tmp_path, TINY.replace("n_heads = 2", "n_heads = 3"))
    assert main(["layout", str(path), "--world-size", "2"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {path}: model.dim: expected a multiple of 2 x n_heads = 6"
    )


def test_help_tells_the_options(capsys: Capture) -> None:
    assert main(["layout", "--help"]) == 0
    assert "CONFIG.toml --world-size N[,N...]" in capsys.readouterr().out
