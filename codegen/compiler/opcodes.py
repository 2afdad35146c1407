"""The one table of opcodes: which pipe of an SM sub-partition an instruction occupies, and where its latency comes from."""

from __future__ import annotations

#: Opcodes by pipe, in the names of `model.compiled.code.PIPES`, Hopper's and Blackwell's.
_OPCODES = {
    "mufu": ("MUFU",),
    # Integer multiplications run there as well, and the moves that compilers write as one.
    "fma": ("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "IMAD", "HFMA2"),
    "alu": ("FMNMX", "FMNMX3", "FSEL", "FSETP", "LOP3", "ISETP", "SEL", "F2FP", "PRMT", "SHF", "VIADD", "LEA", "PLOP3",
            "IADD3", "MOV", "IABS", "VIMNMX", "I2FP", "VOTE", "VOTEU", "P2R", "R2P"),
    "shared": ("SHFL", "LDS", "STS", "SYNCS", "LDSM", "STSM", "LDL", "STL", "LDG", "STG"),
    "control": ("LDC", "S2R", "S2UR", "BAR", "REDUX", "CS2R"),
    "tensor": ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"),
}  # fmt: skip
_PIPE = {opcode: pipe for pipe, opcodes in _OPCODES.items() for opcode in opcodes}
_LATENCY = {
    "MUFU": "mufu", "SHFL": "shuffle", "LDS": "shared", "LDSM": "shared", "LDL": "local", "LDC": "constant", "ULDC": "constant",
    "S2R": "special", "S2UR": "special", "CS2R": "special", "REDUX": "shuffle", "LDG": "global", "I2F": "convert",
    "F2I": "convert", "VOTEU": "vote", "R2UR": "vote", "SYNCS": "poll",
}  # fmt: skip
#: Matrix instructions: mma.sync, wgmma and tcgen05.mma.
MATRIX = _OPCODES["tensor"]


def pipe_of(opcode: str) -> str:
    """The pipe that ``opcode`` occupies; "uniform" for those of the uniform datapath, "other" for the rest."""
    return _PIPE.get(opcode, "uniform" if opcode.startswith("U") or opcode == "R2UR" else "other")


def latency_of(opcode: str) -> str:
    """The latency class of ``opcode`` (`model.compiled.code.LATENCIES`)."""
    return _LATENCY.get(opcode, "fixed")
