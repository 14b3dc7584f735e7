"""Pages of the documentation site that are not files of docs/, and links that hold on GitHub and on the site.

MkDocs calls the functions ``on_...`` while it builds (``mkdocs.yml``). Links in pages are those of the repository.
This file never contains text of the documentation: it copies and generates.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: Pages from files beside docs/, by their names on the site.
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
#: The folder of the site for all other files of the repository that pages link to.
FILES = "repository"
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".sbatch": "sh",
    ".sh": "sh",
    ".md": "markdown",
}
#: Functions of public modules that mkdocstrings takes for the submodule of the same name, by their module.
SHADOWED = {"optim": ["backward_steps.in_backward"]}
LINK = re.compile(r"(?<=\]\()([^()\s:#]+)(?=[#)])")


@functools.cache
def pages() -> dict[str, str]:
    """Each page of the site that has a text in the repository, with the path of that text."""
    own = {str(path.relative_to(DOCS)): str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.md"))}
    return COPIED | own


def target_on_site(source: str, link: str) -> str | None:
    """The place on the site of the file that ``source``, a file of the repository, links to; None if there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    by_text = {text: page for page, text in pages().items()}
    if path in by_text:
        return by_text[path]
    if path.startswith(("..", "docs/")) or not (ROOT / path).exists():
        return None
    return f"{FILES}/{path}.md"


def with_links(text: str, page: str, source: str) -> str:
    """The text of a page with each link to a file of the repository as a link of the site."""

    def link_of(found: re.Match[str]) -> str:
        target = target_on_site(source, found[1])
        return found[1] if target is None else posixpath.relpath(target, posixpath.dirname(page) or ".")

    return LINK.sub(link_of, text.replace("](docs/images/", "](images/") if source == "README.md" else text)


def title_of(source: str) -> str:
    """The first heading of a text of the repository."""
    lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# ") for line in lines if line.startswith("# "))


def with_titles(text: str, source: str) -> str:
    """The text with the titles of pages in place of their file names, where these are the words of a link."""

    def link_of(found: re.Match[str]) -> str:
        page = target_on_site(source, found[2])
        if page not in pages() or posixpath.basename(found[1]) != posixpath.basename(found[2]):
            return found[0]
        return f"[{title_of(pages()[page])}]({found[2]}{found[3]})"

    return re.sub(r"\[((?:\w+/)*\w+\.md)\]\(([^()\s:#]+)(#[^()\s]*|)\)", link_of, text)


def for_python_markdown(text: str) -> str:
    """The text for Python-Markdown, which is stricter than GitHub about lists and about bars in tables.

    Lines that belong to an item of a list get twice their indentation, and an item after a paragraph of the item before
    it gets an empty line before it. In a table GitHub needs the backslash before a bar, and Python-Markdown shows it.
    """
    lines, fenced, in_list, after_blank, loose = [], False, False, True, False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        indent = len(line) - len(line.lstrip())
        item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if not fenced and line.strip():
            if after_blank:
                in_list = item or (in_list and indent >= 2)
                loose = in_list and not item
            elif item and loose:
                lines.append("")
                loose = False
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        after_blank = not line.strip()
        lines.append(" " * indent + line if in_list and line.strip() else line)
    return "\n".join(lines) + "\n"


def linked_files() -> Iterator[str]:
    """Paths of the files and folders of the repository to which pages link, and of the files in these folders."""
    found = set()
    for source in pages().values():
        for link in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            target = target_on_site(source, link)
            if target is not None and target.startswith(FILES):
                found.add(target.removeprefix(f"{FILES}/").removesuffix(".md"))
    for name in sorted(found):
        yield name
        if (ROOT / name).is_dir():
            yield from (f"{name}/{file.name}" for file in entries(name) if f"{name}/{file.name}" not in found)


def entries(folder: str) -> list[Path]:
    return [
        path for path in sorted((ROOT / folder).iterdir()) if path.is_file() and path.name != "__init__.py"
    ]


def page_of_file(name: str) -> str:
    """A page with the content of a file, or with links to the files of a folder."""
    path = ROOT / name
    if path.is_dir():
        links = "\n".join(f"- [{file.name}]({path.name}/{file.name}.md)" for file in entries(name))
        return f"# {name}\n\n{links}\n"
    fence = "`" * 5
    return f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}{fence}\n"


def options() -> str:
    """Every key of a configuration, with its type, default and meaning, as headings of one page."""
    from shardwright.train.config.keys import keys, section_summary

    lines, section = [], ""
    for key in keys():
        name = key.path.partition(".")[0]
        if name != section:
            section = name
            lines.append(f"## [{section}] {{: #{section} }}\n\n{plain(section_summary(section))}\n")
        lines.append(f"#### {plain(key.path)} {{: #{key.path} }}\n")
        lines.append(f"{plain(key.expected)}; default {default_of(key.default)}\n{{: .option }}\n")
        lines.append(f"{plain(key.description)}\n")
    return "\n".join(lines)


def default_of(text: str) -> str:
    """A value as code, and words such as "the preset's" as they are."""
    return plain(text) if " " in text and not text.startswith(('"', "[", "{")) else f"`{text}`"


def plain(text: str) -> str:
    """Text in which Markdown finds no marks except for code."""
    return re.sub(r"([\\*_\[\]{}|])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")


def reference(text: str) -> str:
    """The page of the API: each comment ``<!-- api: names -->`` becomes the reference of these names.

    Public names that no comment has follow at the end, so none is left out.
    """
    listed = re.findall(r"<!-- api: (.*?) -->", text, re.DOTALL)
    names = {name for group in listed for name in group.split()}
    if unknown := names - {*shardwright.__all__}:
        raise ValueError(f"docs/api.md: expected names of shardwright.__all__, found {sorted(unknown)}")
    if others := [name for name in shardwright.__all__ if name not in names]:
        text += f"\n## Other names\n\n<!-- api: {' '.join(others)} -->\n"
    return re.sub(
        r"<!-- api: (.*?) -->", lambda group: "\n".join(map(entry, group[1].split())), text, flags=re.DOTALL
    )


def entry(name: str) -> str:
    """The directive of mkdocstrings for one public name, or a line about a name of torch."""
    if getattr(getattr(shardwright, name), "__module__", "").startswith("torch."):
        return f"### {name}\n\nTorch's own class `torch.distributed.fsdp.{name}`.\n"
    names = [name, *(f"{name}.{function}" for function in SHADOWED.get(name, ()))]
    return "\n".join(f"::: shardwright.{each}\n" for each in names)


def expanded(entries: list[Any], named: set[str]) -> list[Any]:
    """The navigation with pages in place of patterns, and without sections that are empty."""
    result: list[Any] = []
    for each in entries:
        if isinstance(each, str) and "*" in each:
            found = sorted(str(path.relative_to(DOCS)) for path in DOCS.glob(each))
            result += [page for page in found if page not in named]
        elif isinstance(each, dict):
            ((title, value),) = each.items()
            value = expanded(value, named) if isinstance(value, list) else value
            result += [{title: value}] if value else []
        else:
            result.append(each)
    return result


def named_pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for each in (
        entries if isinstance(entries, list) else entries.values() if isinstance(entries, dict) else ()
    ):
        yield from named_pages(each)


def on_config(config: Any) -> Any:
    config.nav = expanded(config.nav, {*named_pages(config.nav)})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    for page, source in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in linked_files():
        file = File.generated(config, f"{FILES}/{name}.md", content=page_of_file(name))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = pages().get(page.file.src_uri)
    if source is None:
        return markdown
    markdown = with_links(with_titles(markdown, source), page.file.src_uri, source)
    markdown = for_python_markdown(markdown)
    markdown = markdown.replace("<!-- options -->", options()) if "<!-- options -->" in markdown else markdown
    return reference(markdown) if "<!-- api:" in markdown else markdown
