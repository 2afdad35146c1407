"""Variants compiled once for good: what machine code says of a kernel is kept by its source, target and compiler.

What is kept is the profile that the simulators read (`KernelCode` of kernels whose tiles they follow, the steady loops of
others), registers and stack; never the binary.  A cache that is damaged, or that cannot be written, is no reason to fail.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tilecast.base.files import OutputError, cache_folder, write_text_atomically
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.profile import Profile, profile_source
from tilecast.codegen.families import template_of
from tilecast.codegen.generate import generate
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import dump_codes, load_codes
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.compiled.roles.store import dump_roles, load_roles
from tilecast.model.families import family_of, find_family
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: Goes up when more is read from the same code: what was kept before is then read anew.
_READING = "4"
#: Folder of tilecast's cache.
FOLDER = "tuned-kernels"


def target_of(family: str, variant: Variant, machine: Machine) -> str:
    """The target of `codegen.compile` for a machine; CompileError where there is none."""
    capability = int(machine["chip.compute_capability"])
    suffix = "a" if capability >= 90 else ""
    wanted = f"sm_{capability}{suffix}"
    able = template_of(find_family(family)).targets(variant, machine)
    if wanted not in able:
        raise CompileError(f"{family} is compiled for {', '.join(able)}, not for {machine.name} (sm_{capability})")
    return wanted


def compiled_variant(workload: Workload, machine: Machine, variant: Variant) -> CompiledVariant:
    """The machine code of ``variant`` for ``machine``, from the cache or compiled here, without a GPU.

    Raises PredictError for a variant that tilecast does not write, where no compiler is installed, and for code that no
    simulator follows.
    """
    template = find_family(variant.family).template
    try:
        target = target_of(template, variant, machine)
        made = kept_profile(template, variant, workload, machine, str(cache_folder(FOLDER)), loops=True)
    except (CompileError, VariantError) as error:
        raise PredictError(
            f"no machine code of {family_of(variant).name} for {machine.name}: {error}: use --level fluid"
        ) from None
    if made.code is None and made.roles is None:
        raise PredictError(f"the machine code of this kernel cannot be followed: {made.unread}: use --level fluid")
    return CompiledVariant(
        target, f"Triton {triton_version()}", made.registers, made.stack_bytes, made.code, made.roles
    )


def kept_profile(
    family: str, variant: Variant, workload: Workload, machine: Machine, cache: str, loops: bool = False
) -> Profile:
    """The profile of a variant, found in ``cache`` ("" for none) or compiled and kept there; with ``loops`` also of kernels
    of which only steady loops can be read.

    Raises VariantError for a variant that cannot be written, CompileError for one that cannot be compiled.
    """
    source = generate(workload, machine, find_family(family), variant, compiler=None).source
    target = target_of(family, variant, machine)
    kept = _kept_as(cache, family, variant, workload, source, target, loops)
    found = _load(kept) if kept is not None and kept.exists() else None
    if found is not None:
        return found
    made = profile_source(source, family, variant_text(variant), workload, target, loops)
    if kept is not None:
        _keep(kept, made)
    return made


def triton_version() -> str:
    """Of the compiler at hand; "none" without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _kept_as(
    cache: str, family: str, variant: Variant, workload: Workload, source: str, target: str, loops: bool
) -> Path | None:
    """The file a kernel's profile is kept in; the header (machine, lengths) does not count."""
    if not cache:
        return None
    reading = f"{_READING}{'l' if loops else ''}"
    name = "\n".join((reading, target, workload.dtype, triton_version(), variant_text(variant), without_header(source)))
    return Path(cache) / f"{family}_{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _keep(path: Path, made: Profile) -> None:
    text = json.dumps({
        "code": dump_codes([made.code]) if made.code else None, "roles": dump_roles([("", made.roles)]) if made.roles else None,
        "unread": made.unread, "registers": made.registers, "stack_bytes": made.stack_bytes,
    })  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except (OSError, OutputError):
        return


def _load(path: Path) -> Profile | None:
    """What `_keep` wrote; None for a file that is damaged or from another version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        code = load_codes(raw["code"])[0] if raw["code"] else None
        roles = load_roles(raw["roles"])[""] if raw["roles"] else None
        return Profile(raw["registers"], raw["stack_bytes"], code, raw["unread"], roles)
    except (OSError, ValueError, LookupError, TypeError):
        return None
