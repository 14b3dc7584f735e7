"""Messages about a run that has saved nothing: they name the way to start it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.train.errors import UserError
from shardwright.train.run.finding import holds_a_run
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.loading import with_weights


def test_a_run_without_checkpoints_is_started_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run 1")
    (folder.checkpoints).mkdir(parents=True)
    assert "which has saved nothing; add --continue to start it again there" in holds_a_run(folder)
    with pytest.raises(
        UserError, match="found none; the run has saved nothing; start it again with: "
    ) as raised:
        with_weights(folder.checkpoints, None, {}, lambda position, read: None)
    assert str(raised.value).endswith(f"train CONFIG.toml --run.dir '{folder.path}' --continue")
    (folder.checkpoints / "step-2").mkdir()
    (folder.checkpoints / "step-2" / "index.json").write_text("{}")
    assert f"continue it with --resume '{folder.path}'" in holds_a_run(folder)
    with pytest.raises(
        UserError, match=r"found only damaged ones \(.*; restore one of them from a copy of it, or"
    ):
        with_weights(folder.checkpoints, None, {}, lambda position, read: None)
