"""A step of a steady loop as the simulator of roles runs it: its kind, its amount, and who arrives at which barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tilecast.codegen.compiler.opcodes import MMA_SYNC, WGMMA, latency_of
from tilecast.codegen.compiler.structure.shape import Barrier, Step
from tilecast.codegen.compiler.structure.slots import Steady
from tilecast.model.compiled.roles import code as roles
from tilecast.model.compiled.roles.code import RoleInstruction

#: Arithmetic on pairs of numbers, which takes its pipe twice as long.
_PAIRS = ("FFMA2", "FADD2", "FMUL2")
_KIND = {"copy_in": "copy", "matrix_wait": "wgmma_wait"}
_HOME = {"shared": "smem", "tensor": "tmem", "registers": "register"}
#: Kinds of arrivals at a barrier that is no named one, and what is done at a named one.
ARRIVALS = ("arrive", "commit", "copy")
NAMED = ("named_wait", "named_arrive")


def kind_of(step: Step) -> str:
    """The simulator's kind of a step; "plain" for what it only issues."""
    opcode = step.instruction.opcode
    if step.kind == "matrix" and opcode in WGMMA | MMA_SYNC:
        return "wgmma" if opcode in WGMMA else "mma_sync"
    if step.kind == "copy_in" and opcode == "LDGSTS":
        return "group_copy"
    kind = _KIND.get(step.kind, step.kind)
    return kind if kind in roles.KINDS else "plain"


def parties_of(chosen: Sequence[Steady], looped: frozenset[Barrier]) -> dict[tuple[Barrier, int, str], int]:
    """(barrier, role, kind of arrival) -> arrivals in a phase: those of an iteration over the waits of one."""
    waited: Counter[Barrier] = Counter()
    for one in chosen:
        mine = Counter(one.site(step) for step in one.repeated if kind_of(step) in ("wait", "named_wait"))
        for site, count in mine.items():
            if site is not None:
                waited[site] = max(waited[site], count)
    found: dict[tuple[Barrier, int, str], int] = {}
    for role, one in enumerate(chosen):
        once = [step for step in (*one.begin, *one.end) if one.site(step) not in looped]
        for steps in (one.ahead, one.repeated, once):
            arrivals = Counter((one.site(step), kind_of(step)) for step in steps if kind_of(step) in ARRIVALS)
            announced = Counter(one.site(step) for step in steps if step.kind == "expect")
            for (site, kind), count in arrivals.items():
                # A named barrier counts threads of any warp.
                if site is None or site.named:
                    continue
                phases = waited[site] if steps is one.repeated else count
                found[site, role, kind] = max(1, round(count / max(1, announced[site] if kind == "copy" else phases)))
    return found


def instruction_of(one: Steady, step: Step, number: dict[Barrier, int], out_bytes: int) -> RoleInstruction:
    """A step of a warp as the simulator runs it; ``number``: of each barrier, ``out_bytes``: that its role copies out in an iteration."""
    code, kind, site = step.instruction, kind_of(step), one.site(step)
    amount = _amount(one, step, kind, out_bytes)
    matrix = kind in roles.MATRIX_KINDS
    shape = step.shape if matrix else (0, 0, 0)
    if kind in NAMED:
        amount, shape = max(0, step.amount), (_brings(one, step), 0, 0)
    if kind in ("shared_load", "shared_store"):
        shape = (step.wavefronts, sum(warp // 4 == one.warp // 4 for warp in one.role.warps), 0)
    pipe = "tmem" if kind in ("tensor_load", "tensor_store") else step.pipe
    remote = any(barrier.owner == "leader" for _, barrier in step.barriers) if kind == "arrive" else step.pair
    return RoleInstruction(
        pipe, *code.scheduling, latency_of(code.opcode, code.modifiers), kind,
        number.get(site, -1) if site is not None else -1, amount, shape,
        _HOME.get(step.source, "") if matrix else "add" if step.note == "adds" else "", _dtype(step) if matrix else "", remote,
        kind == "wait" and bool(step.guard),
    )  # fmt: skip


def _amount(one: Steady, step: Step, kind: str, out_bytes: int) -> int:
    """What `RoleInstruction.amount` is of each kind, but for named barriers."""
    match kind:
        case "tensor_load" | "tensor_store" | "shared_load" | "shared_store":
            return step.amount
        case "wait":
            return one.passes(one.site(step))
        case "copy":
            return _bytes(one, step)
        case "copy_out":
            return _out_bytes(one, step, out_bytes)
        case "wgmma":
            return int(step.note == "commits")
        case "wgmma_wait" | "group_wait" | "group_copy":
            return max(0, step.amount)
    return 2 if step.instruction.opcode in _PAIRS else 0


def _brings(one: Steady, step: Step) -> int:
    """Threads that come to a named barrier with this warp: those of the warps that it stands for, four at most."""
    mine = next((warps for warps, _ in step.barriers if one.warp in warps), ())
    return 32 * sum(warp // 4 == one.warp // 4 for warp in mine)


def _out_bytes(one: Steady, step: Step, out_bytes: int) -> int:
    """Bytes of a copy out: of a loop its share of ``out_bytes``, elsewhere of what its role's warps put into shared memory there."""
    for steps in (one.repeated, one.begin, one.end):
        if any(step is other for other in steps):
            copies = [other for other in steps if other.kind == "copy_out" and other.turn == step.turn]
            stored = sum(other.amount for other in steps if other.kind == "shared_store")
            mine = 4 * 32 * stored * len(one.role.warps)
            return (out_bytes if steps is one.repeated else mine) // max(1, len(copies))
    return 0


def _dtype(step: Step) -> str:
    """The type at whose rate a product runs; of mma.sync also those of which an instruction has 32 bytes in other numbers."""
    opcode, forms = step.instruction.opcode, step.instruction.modifiers.split(".")
    if opcode not in MMA_SYNC:
        return "bf16" if opcode in ("UTCHMMA", "HGMMA") else "fp8"
    if opcode == "BMMA":
        return "b1"
    wide = "tf32" if "TF32" in forms else "bf16"
    return wide if opcode == "HMMA" else "int4" if {"S4", "U4"} & set(forms) else "fp8"


def _bytes(one: Steady, step: Step) -> int:
    """Bytes that a copy brings to one SM: what its barrier is told to expect, over the copies that share it."""
    site = one.site(step)
    for steps in (one.repeated, one.ahead):
        told = [
            other.amount for other in steps if other.kind == "expect" and one.site(other) == site and other.amount > 0
        ]
        copies = sum(other.kind == "copy_in" and one.site(other) == site for other in steps)
        if told and copies:
            return sum(told) // copies // (2 if step.pair else 1)
    return 0
