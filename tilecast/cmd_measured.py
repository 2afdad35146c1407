"""`tilecast validate measured`."""

from __future__ import annotations

import json
from pathlib import Path

from tilecast.cmd_published import CheckError
from tilecast.validation.measured.run import CODES, SUSTAINED, TABLE, run_measured
from tilecast.validation.measured.text import report_dict, report_text, write_scatter


def run(
    *, table: str | None, codes: str | None, machine: str | None, as_json: bool, rows: bool, picture: str | None
) -> str:
    """The report as text or JSON; writes the picture when asked."""
    if picture is not None and Path(picture).suffix not in (".png", ".svg"):
        raise CheckError(f"--picture: expected a name ending in .png or .svg, got '{picture}'")
    report = run_measured(
        Path(table) if table else TABLE, Path(codes) if codes else CODES, machine, None if table else SUSTAINED
    )
    if picture is not None:
        write_scatter(report, picture)
    return json.dumps(report_dict(report), indent=2) if as_json else report_text(report, rows)
