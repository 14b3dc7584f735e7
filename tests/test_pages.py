"""Pages of docs/ and the README: links, options, messages and the parts that the site adds.

The examples of pages run in the tests of their rooms; those of the tutorial and of the README run in test_tutorial.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import re
import shlex
import string
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import pytest

import shardwright
from shardwright.cli import program
from shardwright.cli.command import Call
from tools import docs_site

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [ROOT / name for name in docs_site.pages().values()]
#: Pages with keys that a reader adds, or that an older version had.
OWN_KEYS = ("CHANGELOG.md", "docs/extending.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in TEXTS}


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(name: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(PAGES[name]), re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "-_ "
    return {"".join(c for c in each.lower() if c in kept).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", without_code(PAGES[name]))
    wrong = []
    for link, anchor in re.findall(r"\]\((?!https?:|mailto:)([^()\s#]*)#?([^()\s]*)\)", text):
        path = (ROOT / name).parent / link if link else ROOT / name
        if not path.resolve().exists():
            wrong.append(link)
        elif anchor and anchor not in anchors(str(path.resolve().relative_to(ROOT))):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


def test_each_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    assert len(named) == len({*named})
    assert {*named} <= docs_site.pages().keys()
    patterns = [each.strip('"') for each in re.findall(r"- (\S*\*\.md\S*)$", nav, re.MULTILINE)]
    rest = [page for page in docs_site.pages() if page not in named]
    assert [page for page in rest if not any(Path(page).match(each) for each in patterns)] == []


def test_the_reference_has_every_public_name() -> None:
    text = docs_site.reference(PAGES["docs/api.md"])
    directives = re.findall(r"^(?:::: shardwright\.|### )(\w+)$", text, re.MULTILINE)
    assert sorted(directives) == sorted(shardwright.__all__)


def test_the_options_have_every_key() -> None:
    pytest.importorskip("pydantic")
    from shardwright.train.config.keys import keys

    headings = re.findall(r"^#### .* \{: #(\S+) \}$", docs_site.options(), re.MULTILINE)
    assert headings == [key.path for key in keys()]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OWN_KEYS])
def test_options_in_commands_are_keys(name: str) -> None:
    pytest.importorskip("pydantic")
    from shardwright.train.config.keys import keys

    known = {key.path for key in keys()}
    used = set(re.findall(r"--([a-z]+\.[a-z_0-9.]+[a-z0-9])", PAGES[name]))
    assert {key for key in used - known if not key.startswith("model.arguments.")} == set()


def blocks(name: str, language: str) -> list[str]:
    """The blocks of a page in this language, also those in lists, which are indented."""
    found = re.findall(rf"^( *)```{language}\b[^\n]*\n(.*?)^\1```", PAGES[name], re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "python")])
def test_python_examples_use_names_that_exist(name: str) -> None:
    """Also of the few that no test runs, since they need a GPU or a package that the tests do not install."""
    missing = []
    for code in blocks(name, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sw":
                missing += [] if hasattr(shardwright, node.attr) else [f"sw.{node.attr}"]
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwright":
                missing += [
                    f"{node.module}.{each.name}"
                    for each in node.names
                    if not _exists(str(node.module), each.name)
                ]
    assert missing == []


def _exists(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("shardwright"):
            return False
        pytest.skip(f"needs {error.name}")
    return True


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OWN_KEYS and blocks(name, "toml")])
def test_toml_examples_have_known_keys(name: str) -> None:
    pytest.importorskip("pydantic")
    from shardwright.train.config.keys import keys

    known = {key.path for key in keys()}
    tables = {each.partition(".")[0] for each in known}
    used = set()
    for code in blocks(name, "toml"):
        for table, values in tomllib.loads(code).items():
            if table in tables:
                used |= {f"{table}.{key}" for key in values}
            else:
                assert not isinstance(values, dict) or table in ("speed", "measured"), f"[{table}]"
    opened = {key for key in known if any(each.startswith(f"{key}.") for each in used)}
    assert used - known - opened - {each for each in used if each.startswith("model.")} == set()


@cache
def sources() -> str:
    """The source of the package and the set-up, with the pieces of each string in one."""
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "tools" / "setup.sh"]
    return "\n".join(
        re.sub(r"""["']\s*\n\s*f?["']""", "", path.read_text(encoding="utf-8")) for path in files
    )


def test_messages_of_the_troubleshooting_page_are_those_of_the_source() -> None:
    blocks = re.findall(r"^```output\n(.*?)^```", PAGES["docs/troubleshooting.md"], re.DOTALL | re.MULTILINE)
    shown = [line for block in blocks for line in block.splitlines() if not line.startswith("torch.")]
    assert len(shown) > 40
    parts = [(line, part.strip(" ;:.,()'")) for line in shown for part in line.split("…")]
    missing = [f"{part!r} of {line!r}" for line, part in parts if len(part) > 8 and not is_said(part)]
    assert missing == []


def is_said(text: str) -> bool:
    """Whether the source has the text, or each of its clauses: some messages are put together from these."""
    return text in sources() or all(clause in sources() for clause in re.split(r"[,:;] ", text))


#: Words after which another command begins.
ENDS = ("&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1")


def commands(name: str, tool: str) -> list[list[str]]:
    """The words after the name of a tool, in the shell blocks and the inline code of a page."""
    shell = "\n".join(code for language in ("sh", "bash") for code in blocks(name, language))
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", without_code(PAGES[name]))
    inline = [" ".join(span.split()) for span in spans]
    lines = [
        *re.sub(r"\\\n", "", shell).splitlines(),
        *(each for each in inline if "--" in each or tool == "make"),
    ]
    found = []
    for line in lines:
        if match := re.match(rf"(?:\$ |srun |\w+ -m )*{tool}(?: (.*)|$)", line.strip()):
            words = shlex.split(match[1] or "", comments=True)
            found.append(list(itertools.takewhile(lambda word: word not in ENDS, words)))
    return found


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OWN_KEYS])
def test_commands_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their options exist and get the values that they need; the files of this repository that they name are there."""
    seen: list[Call] = []

    def run(call: Call) -> int:
        seen.append(call)
        return 0

    stubs = {each: dataclasses.replace(command, run=run) for each, command in program.COMMANDS.items()}
    monkeypatch.setattr(program, "COMMANDS", stubs)
    monkeypatch.chdir(ROOT)
    for words in commands(name, "shardwright"):
        if "--help" not in words:
            program._run(words)
            missing = [each for each in words if each.startswith("examples/") and not Path(each).exists()]
            assert missing == [], words
    assert len(seen) == len([words for words in commands(name, "shardwright") if "--help" not in words])


@pytest.mark.parametrize(
    "name", [name for name in PAGES if "make " in PAGES[name] and name != "CHANGELOG.md"]
)
def test_targets_of_make_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {next((word for word in words if "=" not in word), "") for words in commands(name, "make")}
    assert used <= targets | {""}
