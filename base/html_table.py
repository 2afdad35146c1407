"""A small table as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = "border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 10px;border-bottom:1px solid #ddd;white-space:nowrap"


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """``rows`` under ``header``; the first column reads left, the others right; everything is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        parts = (
            f'<{tag} style="{_CELL};text-align:{"left" if n == 0 else "right"}">{html.escape(cell)}</{tag}>'
            for n, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return (
        f'<table style="{_STYLE}"><caption style="text-align:left;font-weight:600;white-space:nowrap">{html.escape(title)}</caption>'
        f"<thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"
    )
