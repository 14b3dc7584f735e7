"""An HTML file that a command writes: its place is looked at before the work begins, and it is replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.common.durable import replace_file
from shardwright.train.errors import UserError
from shardwright.train.report.page.document import LIMIT, size_of
from shardwright.train.run.writing import writing

OPTION = "--html"


def check_place(file: Path) -> None:
    """Raises UserError if no file can be there."""
    if not file.name or os.path.isdir(file):
        raise UserError(f"{OPTION}: expected a file, found a folder at {file}; write {file / 'plan.html'}")
    folder = file.parent
    if not os.path.isdir(folder):
        raise UserError(
            f"{OPTION}: expected a file in a folder that exists, found no folder {folder}; make it first"
        )
    if not os.access(folder, os.W_OK):
        raise UserError(f"{OPTION}: {folder}: cannot write: Permission denied. Choose another folder")


def write_page(file: Path, text: str, advice: str) -> None:
    """Write a page.

    Args:
        file: its place.
        text: of the page.
        advice: for a page that is too large: what to leave out.

    Raises:
        UserError: the page is too large, or the file cannot be written.
    """
    if (size := size_of(text)) >= LIMIT:
        raise UserError(
            f"{file}: expected a page of less than {LIMIT:,} bytes, found {size:,}; the file is not written. {advice}"
        )
    with writing(file, OPTION):
        replace_file(file, text.encode())
