"""``tilecast report``: everything is checked before anything is computed, everything computed before anything is written."""

from __future__ import annotations

from pathlib import Path

from tilecast.base.files import OutputError, check_writable, write_text_atomically
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import parse_changes
from tilecast.model.machine.machine import load_machine


def run_report(
    work: Workload,
    machine: str,
    *,
    output: str,
    markdown: str | None,
    whatif: list[str],
    scale: list[str],
    variant: str | None,
    family: str | None,
    clock: str | float,
    measured: str | None,
    date: str,
) -> str:
    """Write the page or the Markdown twin (or both); returns what to print.  ValueError with one sentence."""
    from tilecast.model.families import native_family, parse_variant

    target, folder = _targets(output, markdown)
    changes, scales = parse_changes("--whatif", whatif), parse_changes("--scale", scale)
    chip = load_machine(machine)
    knobs = parse_variant(variant, native_family(chip).variant()) if variant else None

    from rich.console import Console

    from tilecast.explore.review.build import report
    from tilecast.explore.review.page.render import check_installed

    check_installed(page=target.suffix == ".html")
    screen = Console(stderr=True, highlight=False)
    files: dict[Path, str] = {}
    with screen.status(f"{chip.title}: {work.label()}"):
        content = report(
            work, chip, knobs, family=family, clock=clock, changes=changes, scales=scales, measured=measured, date=date, machine_name=machine
        )  # fmt: skip
        if target.suffix == ".html":
            files[target] = content.page()
        if folder is not None:
            files |= {folder / name: text for name, text in content.markdown(target.stem).items()}
    # The page or the text comes last: where it is, its charts are.
    for path, text in sorted(files.items(), key=lambda item: item[0].suffix != ".svg"):
        write_text_atomically(path, text)
    lines = [f"{path}: {_size(files, path)}" for path in files if path.suffix != ".svg"]
    return "\n".join([*content.verdict, *lines])


def _targets(output: str, markdown: str | None) -> tuple[Path, Path | None]:
    """The file asked for and the folder of the Markdown twin, both known to be writable."""
    target = Path(output)
    if target.suffix not in (".html", ".md"):
        raise OutputError(f"{output}: expected a name that ends in .html (one page) or .md (Markdown with SVGs)")
    if target.suffix == ".md" and markdown is not None:
        raise OutputError(
            f"--markdown {markdown}: {output} is Markdown already, with its charts beside it: give one of the two"
        )
    check_writable(target)
    if markdown is None:
        return target, target.parent if target.suffix == ".md" else None
    check_writable(Path(markdown) / f"{target.stem}.md")
    return target, Path(markdown)


def _size(files: dict[Path, str], path: Path) -> str:
    size = len(files[path].encode()) / 1e6
    if path.suffix == ".html":
        return f"{size:.2f} MB, opens offline"
    charts = [text for name, text in files.items() if name.suffix == ".svg"]
    return f"{size * 1e3:.0f} kB and {len(charts)} charts, {sum(len(c.encode()) for c in charts) / 1e3:.0f} kB"
