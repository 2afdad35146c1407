"""Read a TOML file that a user names: one sentence of the caller's own error class when that cannot be done."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tilecast.base.text_file import content


def read_toml(path: Path, what: str, error: type[Exception], where: str = "") -> dict[str, Any]:
    """The content of ``path``; ``error`` that says ``what`` ("the plan") cannot be read, or that ``where`` is no TOML."""
    try:
        return tomllib.loads(content(path))
    except OSError as failure:
        raise error(f"{path}: cannot read {what}: {failure.strerror or failure}") from None
    except RecursionError:
        raise error(f"{where or path}: not valid TOML: brackets nest too deep") from None
    except UnicodeDecodeError:
        raise error(f"{where or path}: not valid TOML: expected text in UTF-8") from None
    except tomllib.TOMLDecodeError as failure:
        raise error(f"{where or path}: not valid TOML: {failure}") from None
