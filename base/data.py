"""Where the tables that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = DATA / "published"
MEASURED = DATA / "measured"
