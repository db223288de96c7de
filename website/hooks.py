"""What the site adds to the pages of docs/ when mkdocs builds it.

README.md is its first page and CHANGELOG.md another one; the reference of the API has a page for each topic; pictures
(SVG) stand in the page itself, so that they take its colours; and the examples show the cells of the notebook. On their
own, the pages do without that.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["cells", "on_config", "on_files", "on_page_content", "on_page_markdown", "topics"]

ROOT: Final = Path(__file__).resolve().parents[1]
BESIDE: Final = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, and the files that they are elsewhere."""
HOME: Final = """\
[Get started](start.md){ .md-button .md-button--primary } [Port a script](porting.md){ .md-button }

## How it works

Floating-point sums depend on the order of the additions. Elsewhere the number of processes decides that order. Unisono
cuts every batch into micro-batches and adds their gradients along one fixed tree, whoever computes them:

![Eight micro-batches in three rows, coloured by the worker that computes them, for 1, 3 and 4 workers; below them the
same binary summation tree for all three](assets/tree.svg)

When a worker is lost, the others compute what it had not handed over, and the sum is the same:

![A step with three workers over time: w1 is killed while it computes m4; w2 computes m3 and m5, w0 computes m4; then
the step is committed](assets/lost.svg)

[The whole explanation](why.md)

"""
"""What the first page of the site has besides, before `FIRST`."""
FIRST: Final = "## Try it"
NOTEBOOK: Final = re.compile(r"<!-- cells of (\S+\.ipynb) -->")
PICTURE: Final = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*(assets/[\w.-]+\.svg)" ?/>')
CODE: Final = re.compile(r"<code>[^<]*</code>")
OPTION: Final = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
"""Of a command: the browser may not cut a line at its hyphens."""
NAMED: Final = re.compile(r"\[(docs/)?([\w]+\.md)\]\(\2")
"""A link whose text is the name of the page."""
OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version at the end of each page; link to the source where UNISONO_REPOSITORY says where it is."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/unisono/__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    config.copyright = f"Unisono {version[1]}"
    if repository := os.environ.get("UNISONO_REPOSITORY"):
        config.repo_url, config.repo_name, config.edit_uri = repository, "Source", "edit/main/docs/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand beside docs/, and a page for each topic of the API."""
    from mkdocs.structure.files import File

    for name, source in BESIDE.items():
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](CITATION.cff)", "](../CITATION.cff)")
        if name == "index.md":
            text = "---\nhide: [navigation, toc]\n---\n\n" + text.replace(FIRST, HOME + FIRST)
        files.append(File.generated(config, name, content=text))
    overview = files.get_file_from_path("api.md")
    if overview is not None:
        files.remove(overview)
        for name, text in topics(overview.content_string).items():
            files.append(File.generated(config, name, content=text))
    return files


def topics(reference: str) -> dict[str, str]:
    """Return the pages of the API by their names: one for each heading of docs/api.md, and the overview."""
    introduction, *sections = re.split(r"^## ", reference, flags=re.MULTILINE)
    pages, rows = {}, ["| page | names |", "|---|---|"]
    for section in sections:
        title, _, text = section.partition("\n")
        name = f"api/{title.lower().replace(' ', '-')}.md"
        pages[name] = f"# {title}\n{text}"
        names = ", ".join(f"`{found}`" for found in re.findall(r"^::: (\S+)$", text, re.MULTILINE))
        rows.append(f"| [{title}]({name}) | {names} |")
    return {"api.md": introduction + "\n".join(rows) + "\n", **pages}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the cells of notebooks; name pages by their titles, and files outside of the site without a link."""
    markdown = NAMED.sub(lambda match: f"[{_title(match[2], files)}]({match[2]}", markdown)
    markdown = OUTSIDE.sub(r"`\1`", markdown)
    return NOTEBOOK.sub(lambda match: cells(ROOT / "docs" / match[1]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put pictures into the page itself, and end the sentences of docstrings that lead to an example."""
    html = PICTURE.sub(lambda match: (ROOT / "docs" / match[1]).read_text(), html).replace("::</p>", ":</p>")
    return CODE.sub(_code, html)


def _code(found: re.Match[str]) -> str:
    text = found[0].replace("\\|", "|")  # which only GitHub does in a table
    return OPTION.sub(r'<span class="option">\g<0></span>', text)


def _title(name: str, files: Files) -> str:
    file = files.get_file_from_path(name)
    title = re.search(r"^# (.+)$", file.content_string if file is not None else "", re.MULTILINE)
    return title[1] if title is not None else name


def cells(notebook: Path) -> str:
    """Return the cells of a notebook, with their output, as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(_text(output) for output in cell["outputs"]).rstrip("\n")
        if printed:
            parts.append(f'```text title="output"\n{printed}\n```')
    return "\n\n".join(parts)


def _text(output: dict[str, Any]) -> str:
    words = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(words) + ("" if output["output_type"] == "stream" else "\n")
