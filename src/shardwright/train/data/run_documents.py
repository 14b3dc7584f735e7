"""data.json in the folder of a run: the documents that the run has, so that a resume finds the same ones.

`data/dataset.py` decides how documents become samples.
"""

from __future__ import annotations

import json
from typing import Any

from shardwright.train.config.values import DataSettings
from shardwright.train.data.dataset import Dataset, continued
from shardwright.train.data.statement import tokens_of
from shardwright.train.data.tokens.growth import Known
from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.same_job import check_same_data
from shardwright.train.run.writing import write_json


def write_data_record(folder: RunFolder, dataset: Dataset) -> None:
    """Write what the run has of its sources. Raises UserError if the file cannot be written."""
    sources = [each.known.as_json() for each in dataset.materials]
    write_json(folder.data_file, {"sources": sources, "validation": dataset.validation_sha256})


def resumed_data(settings: DataSettings, folder: RunFolder, dataset: Dataset) -> tuple[Dataset, list[str]]:
    """Return the samples that a resumed run had, and lines about what is different now.

    Raises UserError if its documents were changed or removed, or if there are new ones without `data.appended`.
    """
    folder.record()  # raises an error if it is damaged
    if not dataset.materials:  # a text in memory
        check_same_data(folder, dataset.sha256, tokens_of(dataset.train))
        return dataset, []
    known, validation = _read(folder)
    if len(known) != len(dataset.materials):
        raise _damaged(folder, f"{len(known)} sources")
    lines = []
    if dataset.validation_sha256 != validation and dataset.validation is not None:
        lines.append(
            "the validation source differs from the saved run's: validation losses before and after do not compare"
        )
    return continued(settings, dataset, known), lines


def _read(folder: RunFolder) -> tuple[list[Known], str]:
    """Return the documents of each source, and the digest of the validation source."""
    try:
        content: Any = json.loads(folder.data_file.read_text(encoding="utf-8"))
        return [Known.from_json(each) for each in content["sources"]], str(content["validation"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, " ".join(f"{type(error).__name__}: {error}".split())[:200]) from None


def _damaged(folder: RunFolder, found: str) -> UserError:
    return UserError(
        f"{folder.data_file}: expected the documents of the run, found {found}; the file is damaged, restore it"
    )
