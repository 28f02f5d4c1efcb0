"""What the pages are made of: tables, code, drawings and marked text, as Markdown and HTML."""

from __future__ import annotations

import base64
import html
import inspect
import re
import textwrap
from pathlib import Path


def embedded(file: Path, text: str) -> str:
    """A drawing inside the page."""
    encoded = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{text}" src="data:image/svg+xml;base64,{encoded}">'


def linked(paper: str) -> str:
    """The paper with its arXiv numbers as links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r'<a href="https://arxiv.org/abs/\1">\1</a>', html.escape(paper))


def paragraphs(docstring: str) -> str:
    """A docstring as paragraphs."""
    return "\n\n".join(f"<p>{marked(one)}</p>" for one in inspect.cleandoc(docstring).split("\n\n"))


def marked(text: str) -> str:
    """Plain text as HTML: `code` and *word* are its only marks, so that h_0, n * softmax and |y| stay as they are."""
    text = html.escape(re.sub(r"\s+", " ", text), quote=False)
    return re.sub(r"(?<!\w)\*(\w+)\*(?!\w)", r"<em>\1</em>", re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]], wide: tuple[str, ...] = ()) -> str:
    """Cells are HTML; the columns titled `wide` get room for a line of an equation or of text."""
    head = "".join(f"<th{' style=min-width:14rem' if title in wide else ''}>{title}</th>" for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def fence(text: str, language: str = "text") -> str:
    """A code block."""
    return f"```{language}\n{text.rstrip()}\n```"


def folded(title: str, content: str) -> str:
    """A block that opens on a click."""
    return f'??? note "{title}"\n\n{textwrap.indent(content, "    ")}'
