"""The one table of opcodes (sm_80, sm_90a, sm_100a, sm_103a): what an instruction occupies, moves and waits for.

Which opcodes exist, and what they are about, is NVIDIA's list (CUDA Binary Utilities, "Instruction Set Reference", Ampere to
Blackwell); pipes are where `tilecast calibrate` or Nsight Compute saw them.  An opcode that is not here is refused by name
(`check_known`): a reader that skips what it does not know counts wrongly without saying so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Who an instruction works for: each lane alone, each lane on two packed numbers, the warp once, the four warps of a
#: warpgroup together, or one thread for the whole CTA (or pair of CTAs).
WIDTHS = ("lane", "packed", "warp", "warpgroup", "cta")


@dataclass(frozen=True, slots=True)
class Opcode:
    """What the readers know of an opcode; memory is named by space: shared, global, local, constant or tensor."""

    #: In the names of `model.compiled.code.PIPES`.
    pipe: str
    width: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    #: Its effect is awaited by a barrier, a group or a fence of its own, not by a counter of the warp.
    asynchronous: bool = False


#: pipe, width, spaces read, spaces written, asynchronous, opcodes.
_ROWS: tuple[tuple[str, str, str, str, bool, str], ...] = (
    ("mufu", "lane", "", "", False, "MUFU"),
    # Integer multiplications run there as well, and the moves that compilers write as one.
    ("fma", "lane", "", "", False, "FFMA FADD FMUL IMAD HFMA2 FHADD FHFMA"),
    ("fma", "packed", "", "", False, "FFMA2 FADD2 FMUL2"),
    ("alu", "lane", "", "", False,
     "FMNMX FMNMX3 FSEL FSETP LOP3 ISETP SEL F2FP PRMT SHF VIADD LEA PLOP3 IADD3 MOV IABS VIMNMX I2FP P2R R2P"),
    ("alu", "warp", "", "", False, "VOTE VOTEU"),
    ("shared", "lane", "", "", False, "SHFL"),
    ("shared", "lane", "shared", "", False, "LDS LDSM"),
    ("shared", "lane", "", "shared", False, "STS STSM"),
    ("shared", "warp", "shared", "shared", False, "SYNCS"),
    ("shared", "lane", "local", "", False, "LDL"),
    ("shared", "lane", "", "local", False, "STL"),
    ("shared", "lane", "global", "", False, "LDG"),
    ("shared", "lane", "", "global", False, "STG"),
    ("control", "lane", "constant", "", False, "LDC"),
    ("control", "warp", "", "", False, "S2R S2UR BAR REDUX CS2R"),
    ("tensor", "warp", "", "", False, "HMMA IMMA QMMA OMMA BMMA DMMA"),
    ("tensor", "warpgroup", "shared", "", True, "HGMMA QGMMA IGMMA BGMMA"),
    ("tensor", "cta", "shared tensor", "tensor", True, "UTCHMMA UTCQMMA UTCIMMA UTCOMMA"),
    # The uniform datapath: once a warp.
    ("uniform", "warp", "", "", False,
     "UMOV UIADD3 UIMAD ULEA ULOP3 USHF UISETP USEL UPLOP3 USGXT UPRMT UFLO UPOPC UBREV UBMSK UP2UR UR2UP UCLEA UIABS "
     "UVIMNMX UVIMNMX3 UVIADD UVIADDMNMX UIMNMX UIADD ULOP USHL USHR UPSETP R2UR UF2FP UFADD UFMUL UFFMA UFMNMX UFSEL UFSETP "
     "UFRND UF2I UF2F UI2F UI2FP UI2I UMEMSETS USETMAXREG USETSHMSZ UVIRTCOUNT UCGABAR_ARV UCGABAR_WAIT UCGABAR_GET UCGABAR_SET "
     "UGETNEXTWORKID UTCBAR UTCATOMSWS UTMACCTL UTMAPF UTMACMDFLUSH UBLKPF UTCSHIFT"),
    ("uniform", "warp", "constant", "", False, "ULDC LDCU"),
    ("uniform", "cta", "global", "shared", True, "UTMALDG"),
    ("uniform", "cta", "shared", "global", True, "UTMASTG UTMAREDG UBLKRED"),
    ("uniform", "cta", "shared global", "shared global", True, "UBLKCP"),
    ("uniform", "cta", "shared", "tensor", True, "UTCCP"),
    # Vector instructions of a pipe that no rule of the simulator needs.
    ("other", "lane", "", "", False,
     "I2F F2I F2F I2I FRND I2IP F2IP FLO POPC BREV BMSK SGXT IMNMX VIADDMNMX VIMNMX3 IADD IADD32I IDP IDP4A IMUL IMUL32I "
     "ISCADD ISCADD32I LOP LOP32I SHL SHR VABSDIFF VABSDIFF4 VHMNMX FADD32I FFMA32I FMUL32I FCHK FSET FSWZADD HADD2 "
     "HADD2_32I HFMA2_32I HMNMX2 HMUL2 HMUL2_32I HSET2 HSETP2 DADD DFMA DMUL DSETP MOV32I MOVM PSETP MATCH LEPC LDTRAM "
     "GETLMEMBASE SETLMEMBASE QSPC RPCMOV"),
    ("other", "lane", "global", "", False, "LD LDGMC"),
    ("other", "lane", "", "global", False, "ST"),
    ("other", "lane", "global", "shared", True, "LDGSTS"),
    ("other", "lane", "", "shared", True, "STAS"),
    ("other", "lane", "shared", "shared", False, "ATOMS REDAS"),
    ("other", "lane", "global", "global", False, "ATOM ATOMG RED REDG"),
    ("other", "lane", "tensor", "", False, "LDTM LDT"),
    ("other", "lane", "", "tensor", True, "STTM STT"),
    ("other", "warp", "", "", False,
     "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSSY BSYNC BREAK BMOV WARPSYNC YIELD NANOSLEEP BPT NOP ELECT CREDUX "
     "WARPGROUP WARPGROUPSET DEPBAR LDGDEPBAR ARRIVES FENCE MEMBAR ERRBAR CGAERRBAR CCTL CCTLL CCTLT B2R R2B PMTRIG SETCTAID "
     "ACQBULK ACQSHMINIT PREEXIT ENDCOLLECTIVE UTCLDSWS UTCSTSWS"),
)  # fmt: skip
OPCODES: dict[str, Opcode] = {
    name: Opcode(pipe, width, tuple(reads.split()), tuple(writes.split()), asynchronous)
    for pipe, width, reads, writes, asynchronous, names in _ROWS
    for name in names.split()
}
_LATENCY = {
    "MUFU": "mufu", "SHFL": "shuffle", "LDS": "shared", "LDSM": "shared", "LDL": "local", "LDC": "constant", "ULDC": "constant",
    "S2R": "special", "S2UR": "special", "CS2R": "special", "REDUX": "shuffle", "LDG": "global", "I2F": "convert",
    "F2I": "convert", "VOTEU": "vote", "R2UR": "vote", "SYNCS": "poll",
}  # fmt: skip
#: Matrix instructions: mma.sync, wgmma and tcgen05.mma.
MATRIX = tuple(name for name, known in OPCODES.items() if known.pipe == "tensor")
#: Matrix instructions by who issues them.
MMA_SYNC, WGMMA, TCGEN05 = (
    frozenset(name for name in MATRIX if OPCODES[name].width == width) for width in ("warp", "warpgroup", "cta")
)


class UnknownOpcodeError(ValueError):
    """A listing with an instruction that the table does not know: which, where."""


def check_known(opcodes: Iterable[tuple[str, int]], where: str) -> None:
    """UnknownOpcodeError for the first of (opcode, address) that the table does not have; ``where`` names the kernel."""
    for opcode, address in opcodes:
        if opcode not in OPCODES:
            raise UnknownOpcodeError(
                f"{where}: expected instructions of sm_80 to sm_103a, got '{opcode}' at {address:#x}, which the table "
                "of opcodes does not know: nothing about this kernel is guessed"
            )


def pipe_of(opcode: str) -> str:
    """The pipe that ``opcode`` occupies; "uniform" for unknown ones of the uniform datapath, "other" for the rest."""
    known = OPCODES.get(opcode)
    return known.pipe if known else "uniform" if opcode.startswith("U") else "other"


def latency_of(opcode: str, modifiers: str = "") -> str:
    """The latency class of ``opcode`` (`model.compiled.code.LATENCIES`)."""
    # A load that others' stores must be seen by goes to L2, where they are.
    return "l2" if opcode == "LDG" and "STRONG" in modifiers else _LATENCY.get(opcode, "fixed")
