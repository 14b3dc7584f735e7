"""The HTML file: its head, its style, its script, and the data that the script shows.

The data are text of others, such as names of runs and units. So they stand in the file as JSON without a character that
can end a tag, the script puts them into the page as text alone, and the browser runs no other script.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from shardwright.common.json_text import strict_json
from shardwright.common.package import __version__

LIMIT = 1_500_000  #: bytes of a file, which no page that is written reaches
SCRIPTS = ("elements.js", "charts.js", "step.js", "plan.js", "runs.js", "page.js")
STYLE = "page.css"
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
}  # other characters outside ASCII are escaped by json

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="shardwright {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript><p>This page needs JavaScript: it draws its pictures and tables from the data in this file.</p></noscript>
<main id="main"></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def document(title: str, data: Mapping[str, Any]) -> str:
    """Return the text of an HTML file.

    Args:
        title: of the browser's tab.
        data: plain values, with the key ``kind``, which ``page.js`` reads.

    The text can always be encoded: halves of characters, which damaged files may have, are replaced in it.
    """
    title = title.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    style, script = _asset(STYLE), "".join(_asset(name) for name in SCRIPTS)
    about = {
        "title": title,
        "version": __version__,
        "made": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    script = f'(() => {{\n"use strict";\n{script}}})();\n'
    return _PAGE.format(
        style_hash=_hash(style),
        script_hash=_hash(script),
        version=html.escape(__version__),
        title=html.escape(title),
        style=style,
        data=embedded({**about, **data}),
        script=script,
    )


def size_of(text: str) -> int:
    """Return the bytes of a file with this text, which must be fewer than `LIMIT`."""
    return len(text.encode())


def embedded(data: Mapping[str, Any]) -> str:
    """Return the data as JSON that no HTML parser takes for a tag, a comment or an entity."""
    text = strict_json(data, compact=True)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return (
        resources.files("shardwright.train.report.page").joinpath("assets", name).read_text(encoding="utf-8")
    )


def _hash(text: str) -> str:
    """Its hash for the policy, which lets the browser run this script, or use this style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


Point = tuple[int, float]


def thinned(points: Sequence[Point], most: int) -> list[list[float]]:
    """Return at most `most` points of a curve, with six digits; the first and the last one are among them.

    Each part of the curve keeps its least and its largest value, so no spike is lost.
    """
    kept = list(points)
    if len(kept) > most:
        inner, parts = kept[1:-1], max(1, (most - 2) // 2)
        kept = kept[:1]
        for number in range(parts):
            part = inner[number * len(inner) // parts : (number + 1) * len(inner) // parts]
            ends = {min(part, key=_value), max(part, key=_value)}
            kept += sorted(ends)
        kept.append(points[-1])
    return [[step, float(f"{value:.6g}")] for step, value in kept]


def _value(point: Point) -> float:
    return point[1]
