"""The document as one HTML page that opens offline, and as Markdown with an SVG a chart."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tilecast.explore.review.content.content import ReviewContent
from tilecast.explore.review.page.charts import Bars, Chart
from tilecast.explore.review.page.document import Document, document
from tilecast.explore.review.page.drawings import svg
from tilecast.explore.review.page.plots import figure

_TEMPLATES = Path(__file__).parent / "templates"
#: Buttons of a timeline: what they do and what they say.
_MOVES = (
    ("steady", "Steady state"), ("all", "From the start"), ("in", "Zoom in"), ("out", "Zoom out"), ("earlier", "Earlier"), ("later", "Later"),
)  # fmt: skip


class ReportError(ValueError):
    """A report that cannot be made: one sentence with what is missing and how to get it."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A chart as the templates want it."""

    ident: str
    title: str
    caption: str
    zoomable: bool
    spec: Markup
    image: str
    file: str


def html_page(content: ReviewContent) -> str:
    """The whole review as one file without a single outside reference; about 5.5 MB, most of it the chart library."""
    check_installed(page=True)
    return _render("review.html.j2", content, document(content), "")


def markdown_files(content: ReviewContent, name: str) -> dict[str, str]:
    """{file name: text} of the Markdown twin: ``name``.md and its charts ``name``-*.svg."""
    check_installed(page=False)
    doc = document(content)
    files = {f"{name}.md": _render("review.md.j2", content, doc, name)}
    files.update({f"{name}-{c.ident}.svg": svg(c) for section in doc.sections for c in section.charts})
    return files


def _render(template: str, content: ReviewContent, doc: Document, name: str) -> str:
    page = template.endswith(".html.j2")
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, autoescape=page, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["cell"] = _cell
    environment.filters["strong"] = _strong
    environment.filters["breakable"] = _breakable
    sections = [
        {"ident": s.ident, "title": s.title, "paragraphs": s.paragraphs, "tables": s.tables, "bullets": s.bullets, "code": s.code, "hint": s.hint,
         "zooms": next((c.ident for c in s.charts if isinstance(c, Bars) and c.zoom), ""),
         "charts": [_shown(c, page, name) for c in s.charts]}
        for s in doc.sections
    ]  # fmt: skip
    shown = {
        "title": doc.title,
        "question": doc.question,
        "verdict": doc.verdict,
        "figures": doc.figures,
        "sections": sections,
    }
    values: dict[str, object] = {
        "doc": shown,
        "version": content.provenance.version,
        "date": content.provenance.date,
        "moves": _MOVES,
    }
    if page:
        values |= {"style": _file("style.css"), "script": _file("page.js"), "plotly": Markup(_plotly())}
    return environment.get_template(template).render(values)


def _shown(chart: Chart, page: bool, name: str) -> _Shown:
    zoomable = isinstance(chart, Bars) and chart.zoom
    if not page:
        return _Shown(chart.ident, chart.title, chart.caption, zoomable, Markup(""), "", f"{name}-{chart.ident}.svg")
    # "<" only as an escape: nothing in the data can end the script element.
    spec = json.dumps(figure(chart), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    image = base64.b64encode(svg(chart).encode()).decode()
    return _Shown(chart.ident, chart.title, chart.caption, zoomable, Markup(spec), image, "")


def _file(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _plotly() -> str:
    """The chart library's own minified build, from the installed package without importing it."""
    found = find_spec("plotly")
    assert found is not None and found.submodule_search_locations, "check_installed comes first"
    return (Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def check_installed(page: bool) -> None:
    """ReportError where a package that draws is missing: matplotlib, and plotly for a page."""
    for name in ("matplotlib", "plotly") if page else ("matplotlib",):
        if find_spec(name) is None:
            raise ReportError(f"the report needs {name}, which is not installed: pip install 'tilecast[report]'")


def _strong(text: str) -> Markup:
    """``**Title.** Sentence`` as HTML, everything else escaped."""
    parts = text.split("**")
    if len(parts) != 3:
        return escape(text)
    return Markup("{}<strong>{}</strong>{}").format(*parts)


def _breakable(text: str) -> Markup:
    """A long command that a narrow screen may break after commas; copying it gives the text unchanged."""
    return Markup(str(escape(text)).replace(",", ",<wbr>"))


def _cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
