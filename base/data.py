"""Where the tables and kernels that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
DATA = _PACKAGE / "data"
PUBLISHED = DATA / "published"
MEASURED = DATA / "measured"
#: Loops of kernels as compiled, for forecasts without a compiler; and what other kernels are generated from.
LOOPS = DATA / "loops" / "sm_90a.txt"
#: Targets whose loops are kept.
LOOP_TARGETS = ("sm_90a",)
GENERATOR = _PACKAGE / "codegen"
#: Error of forecasts by GPU and dtype, as `validation.accuracy` found it.
MODEL_ERROR = DATA / "model_error.csv"
SHIPPED_KERNELS = _PACKAGE / "kernels" / "generated"


def shipped_kernel(name: str | Path) -> Path | None:
    """The file of the shipped kernel of that name, with or without ".py"; None where there is none."""
    name = Path(name)
    file = SHIPPED_KERNELS / f"{name.name.removesuffix('.py')}.py"
    return file if name.parent == Path(".") and file.is_file() else None
