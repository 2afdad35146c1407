"""Variants compiled once for good: what machine code says of a kernel is kept by its source, target and compiler.

What is kept is the profile that the simulators read (`KernelCode` of kernels whose tiles they follow, the steady loops of
others), registers and stack; never the binary.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tilecast.base.files import cache_folder
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.profile import Profile, profile_source
from tilecast.codegen.compiler.records import keep, kept, record_file
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
_READING = "7"
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
    reading = f"{_READING}{'l' if loops else ''}"
    # The header (machine, lengths) does not count.
    said = (reading, target, workload.dtype, triton_version(), variant_text(variant), without_header(source))
    file = record_file(cache, family, *said)
    if cache and (found := kept(file, _profile)) is not None:
        return found
    made = profile_source(source, family, variant_text(variant), workload, target, loops)
    if cache:
        keep(file, _record(made))
    return made


def triton_version() -> str:
    """Of the compiler at hand; "none" without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _record(made: Profile) -> dict[str, Any]:
    return {
        "code": dump_codes([made.code]) if made.code else None, "roles": dump_roles([("", made.roles)]) if made.roles else None,
        "unread": made.unread, "registers": made.registers, "stack_bytes": made.stack_bytes,
    }  # fmt: skip


def _profile(record: dict[str, Any]) -> Profile:
    code = load_codes(record["code"])[0] if record["code"] else None
    roles = load_roles(record["roles"])[""] if record["roles"] else None
    return Profile(record["registers"], record["stack_bytes"], code, record["unread"], roles)
