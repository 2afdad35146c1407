"""What users get of a design review: its content, which can write itself down."""

from __future__ import annotations

import html
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from tilecast.base.html_table import html_table
from tilecast.base.words import significant
from tilecast.explore.review.content.content import ReviewContent
from tilecast.explore.review.page.render import html_page, markdown_files


@dataclass(frozen=True, slots=True, repr=False)
class Review(ReviewContent):
    """The whole review, as `tilecast.report` returns it."""

    def page(self) -> str:
        """The review as one HTML file that opens offline."""
        return html_page(self)

    def markdown(self, name: str = "review") -> dict[str, str]:
        """{file name: text}: ``name``.md and one SVG a chart beside it."""
        return markdown_files(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Every value of the review by its field's name, as JSON takes it."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def __repr__(self) -> str:
        return f"Review({self.title}: {' '.join(self.verdict)})"

    def _repr_html_(self) -> str:
        rows = [
            (r.name, f"{r.time_ms:.4g}", significant(r.tflops), f"{significant(r.low)} to {significant(r.high)}", f"{r.clock_mhz:.0f}")
            for r in self.regimes
        ]  # fmt: skip
        head = html_table(self.title, ("clock", "time, ms", "TFLOP/s", "interval", "MHz"), rows)
        return head + "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.verdict)


def _plain(value: Any) -> Any:
    """``value`` as JSON takes it: dataclasses by their own ``to_dict`` or ``as_dict``, or by their fields."""
    for method in ("to_dict", "as_dict"):
        if hasattr(value, method):
            return _plain(getattr(value, method)())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
