"""What users get of a design review: its content, which can write itself down."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.explore.review.content.content import ReviewContent
from tilecast.explore.review.page.render import html_page, markdown_files


@dataclass(frozen=True, slots=True)
class Review(ReviewContent):
    """The whole review, as `tilecast.report` returns it."""

    def page(self) -> str:
        """The review as one HTML file that opens offline."""
        return html_page(self)

    def markdown(self, name: str = "review") -> dict[str, str]:
        """{file name: text}: ``name``.md and one SVG a chart beside it."""
        return markdown_files(self, name)
