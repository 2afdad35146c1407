"""`tilecast validate published`."""

from __future__ import annotations

import json
from pathlib import Path

from tilecast.validation.published.run import run_published
from tilecast.validation.published.text import report_dict, report_text, write_scatter


class CheckError(ValueError):
    """A wrong option of a validation verb; one sentence."""


def run(*, as_json: bool, rows: bool, picture: str | None, clock: str) -> str:
    """The report as text or JSON; writes the picture when asked."""
    if clock not in ("sustained", "short"):
        raise CheckError(f"--clock: expected sustained or short, got '{clock}'")
    if picture is not None:
        target = Path(picture)
        if target.suffix not in (".png", ".svg"):
            raise CheckError(f"--picture: expected a name ending in .png or .svg, got '{picture}'")
        if not target.parent.is_dir():
            raise CheckError(f"{picture}: cannot write: folder {target.parent} does not exist")
    report = run_published(clock)
    if picture is not None:
        write_scatter(report, picture)
    if as_json:
        return json.dumps(report_dict(report), indent=2)
    return report_text(report, rows, run_published("short" if clock == "sustained" else "sustained"))
