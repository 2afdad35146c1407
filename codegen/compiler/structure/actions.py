"""What one instruction waits for, arrives at, copies or multiplies: from its modifiers and the values it reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.codegen.compiler.flow import Loop
from tilecast.codegen.compiler.opcodes import MMA_SYNC, TCGEN05, WGMMA
from tilecast.codegen.compiler.sass import Instruction
from tilecast.codegen.compiler.structure.barriers import Places, Sites
from tilecast.codegen.compiler.structure.operands import operands_of
from tilecast.codegen.compiler.structure.shape import Step
from tilecast.codegen.compiler.structure.values import Values

_MMA_SYNC = re.compile(r"\.(8|16)(8)(\d+)\b")
_WGMMA = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_COLUMNS = re.compile(r"\.x(\d+)\b")
_DESCRIPTOR = re.compile(r"idesc\[(UR\d+)\]")
_NUMBER = re.compile(r"0x[0-9a-f]+$")
#: Bit of a poll's operand that is the parity of the phase it waits for.
_PARITY = 31
#: A phase's arrivals as `mbarrier.init` packs them into the low word.
_PHASE = 0x100000
#: Loads and stores of shared memory by lanes, and how many 8x8 matrices one moves.
_SHARED = {"LDS": "shared_load", "LDSM": "shared_load", "STS": "shared_store", "STSM": "shared_store"}
_MATRICES = re.compile(r"\.M88(?:\.(\d))?\b")
#: Banks of shared memory, of 4 bytes each; lanes of a warp.
_BANKS, _LANES = 32, 32
#: K of a tcgen05 product by kind; tf32's is half of the 16-bit types'.
_K = {"UTCHMMA": 16, "UTCQMMA": 32, "UTCIMMA": 32, "UTCOMMA": 64}
#: Bit of a descriptor with block scales that says K = 96 in place of 64.
_LONG_K = 31
_TF32 = 2
_PLAIN = {
    "FENCE": "fence", "MEMBAR": "fence", "ELECT": "elect", "R2UR": "to_uniform", "LDGDEPBAR": "group", "UTMACMDFLUSH": "group",
    "UCGABAR_ARV": "cluster_arrive", "UCGABAR_WAIT": "cluster_wait",
}  # fmt: skip


@dataclass(frozen=True)
class Actions:
    """Steps of the instructions of a listing, for one group of warps."""

    values: Values
    places: Places

    def step(self, index: int, around: Sequence[Loop]) -> Step:
        """What instruction ``index`` does inside the loops ``around`` it, outermost first."""
        code = self.values.flow.instructions[index]
        opcode, forms = code.opcode, code.modifiers
        if opcode == "SYNCS":
            return self._sync(index, code, around)
        if opcode == "BAR":
            return self._named(index, code, around)
        if opcode in WGMMA or opcode in MMA_SYNC or opcode in TCGEN05:
            return self._product(index, code)
        if opcode in ("UTMALDG", "UBLKCP", "UTMASTG", "UTMAREDG", "LDGSTS", "UTCCP"):
            return self._copy(index, code, around)
        if opcode == "UTCBAR":
            sites = self.places.barrier(self.values.address(index, code.operands), around)
            return Step(code, "commit", sites, pair=".2CTA" in forms, multicast="MULTICAST" in forms)
        if opcode == "ARRIVES":
            return Step(code, "arrive", self.places.barrier(self.values.address(index, code.operands), around))
        if opcode in ("LDTM", "STTM"):
            found = _COLUMNS.search(forms)
            return Step(
                code, "tensor_load" if opcode == "LDTM" else "tensor_store", amount=int(found.group(1)) if found else 1
            )
        if (opcode == "WARPGROUP" and "DEPBAR" in forms) or (opcode == "DEPBAR" and ".LE" in forms):
            return Step(code, "matrix_wait" if opcode == "WARPGROUP" else "group_wait", amount=_last(code))
        if opcode in _SHARED:
            return self._shared(index, code)
        if opcode == "USETMAXREG":
            return Step(code, "registers", amount=_last(code))
        return Step(code, _PLAIN.get(opcode, "plain"))

    def _sync(self, index: int, code: Instruction, around: Sequence[Loop]) -> Step:
        operands, forms = operands_of(code.operands), code.modifiers.split(".")
        if not operands:
            return Step(code, "plain")
        at = next((one for one in operands if "[" in one), "")
        address = self._under(index, self.values.address(index, at)) if at else None
        sites = self.places.barrier(address, around) if at else ()
        first = self._first(sites, address)
        last = self.places.number(self.values.of(index, operands[-1]), self.values.guard(index))
        if "PHASECHK" in forms:
            phase = self.places.at_first(self._under(index, self.values.of(index, operands[-1])))
            return Step(code, "wait", sites, -1 if phase is None else phase >> _PARITY & 1, first=first)
        if "EXCH" in forms:
            # An elected thread sets barriers up; what it writes was computed under a vote of its own.
            value = self.values.of(index, operands[-1])
            while last is None and value is not None and self.values.graph.nodes[value][0] == "choose":
                value = int(self.values.graph.nodes[value][2])
                last = self.places.number(value)
            return Step(code, "init", sites, -1 if last is None else _PHASE - (last >> 1))
        if "ARRIVE" in forms:
            if "A1T0" in forms or "ART0" in forms:
                return Step(code, "arrive", sites, 1 if "A1T0" in forms else -1 if last is None else last, first=first)
            # With a number of bytes that copies have yet to bring.
            return Step(code, "expect", sites, -1 if last is None else last, first=first)
        return Step(code, "plain")

    def _shared(self, index: int, code: Instruction) -> Step:
        """A load or store of shared memory by lanes: registers of a lane, wavefronts of a warp."""
        matrices = _MATRICES.search(code.modifiers)
        registers = int(matrices.group(1) or 1) if matrices else lane_bytes(code.modifiers) // 4
        least = registers
        if not matrices:
            at = next((one for one in operands_of(code.operands) if "[" in one), "")
            # Without the lanes' addresses, as many as bytes that differ from lane to lane take at least.
            least = wavefronts(self.places.by_lane(self.values.address(index, at)), registers) or registers
        return Step(code, _SHARED[code.opcode], amount=registers, wavefronts=least)

    def _named(self, index: int, code: Instruction, around: Sequence[Loop]) -> Step:
        operands = operands_of(code.operands)
        if not operands or "RED" in code.modifiers:
            return Step(code, "plain")
        sites = self.places.barrier(self.values.of(index, operands[0]), around, named=True)
        count = self.places.number(self.values.of(index, operands[1])) if len(operands) > 1 else None
        kind = "named_arrive" if "ARV" in code.modifiers else "named_wait"
        return Step(code, kind, sites, -1 if count is None else count)

    def _product(self, index: int, code: Instruction) -> Step:
        operands = operands_of(code.operands)
        if code.opcode in MMA_SYNC:
            found = _MMA_SYNC.search(code.modifiers)
            shape = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
            return Step(code, "matrix", shape=(shape[0], shape[1], shape[2]), source="registers")
        if code.opcode in WGMMA:
            found = _WGMMA.search(code.modifiers)
            m, n, k = (int(part) for part in found.groups()) if found else (0, 0, 0)
            source = "shared" if operands[1].startswith("gdesc") else "registers"
            return Step(code, "matrix", shape=(m, n, k), source=source, note="commits" if "gsb0" in operands else "")
        source = "shared" if operands[0].startswith("gdesc") else "tensor"
        return Step(code, "matrix", shape=self._tcgen05(index, code), source=source, pair=".2CTA" in code.modifiers)

    def _tcgen05(self, index: int, code: Instruction) -> tuple[int, int, int]:
        """m, n, k by the instruction descriptor (PTX ISA, "Instruction descriptor"); zeros where its value is not known."""
        named, depth = _DESCRIPTOR.search(code.operands), _K.get(code.opcode)
        held = self.places.number(self.values.of(index, named.group(1))) if named else None
        if held is None or depth is None:
            return (0, 0, 0)
        if code.opcode == "UTCHMMA" and held >> 7 & 7 == _TF32:
            depth //= 2
        if code.opcode == "UTCOMMA" and held >> _LONG_K & 1:
            depth = 96
        return (held >> 24 & 31) << 4, (held >> 17 & 63) << 3, depth

    def _copy(self, index: int, code: Instruction, around: Sequence[Loop]) -> Step:
        opcode, forms = code.opcode, code.modifiers
        if opcode == "LDGSTS":
            return Step(code, "copy_in", amount=lane_bytes(forms))
        pair, multicast = ".2CTA" in forms, "MULTICAST" in forms
        if opcode == "UTCCP":
            return Step(code, "copy_in", pair=pair, multicast=multicast)
        if opcode in ("UTMASTG", "UTMAREDG") or (opcode == "UBLKCP" and ".G.S" in forms):
            return Step(code, "copy_out")
        address = self._beside(index, code)
        sites = self.places.barrier(address, around)
        return Step(code, "copy_in", sites, first=self._first(sites, address), pair=pair, multicast=multicast)

    def _first(self, sites: Sites, address: int | None) -> int:
        """The place in a ring that is asked for first; -1 of a barrier alone."""
        return self.places.first(address) if any(barrier.stages > 1 for _, barrier in sites) else -1

    def _beside(self, index: int, code: Instruction) -> int | None:
        """The barrier of a copy lies in the register after the one with its place in shared memory."""
        found = re.search(r"\[UR(\d+)\]", code.operands)
        value = self.values.of(index, f"UR{int(found.group(1)) + 1}") if found else None
        return self._under(index, value)

    def _under(self, index: int, value: int | None) -> int | None:
        """What is written under the same predicate as instruction ``index`` is what it reads."""
        guard = self.values.guard(index)
        while value is not None and guard is not None and self.values.graph.nodes[value][:2] == ("choose", guard):
            value = int(self.values.graph.nodes[value][2])
        if value is not None and guard is not None and self.values.graph.nodes[value][:2] == ("f", "add"):
            parts = [self._under(index, int(one)) for one in self.values.graph.nodes[value][3:]]
            return self.values.graph.of("f", "add", "", *(one for one in parts if one is not None))
        return value


def wavefronts(places: Sequence[int | None], registers: int) -> int:
    """Wavefronts of an access of ``registers`` words a lane at byte addresses ``places``; 0 where one is not known.

    As many lanes go at a time as 128 bytes are of, and each such part as often as its fullest bank has words: where lanes read
    the same words as well (8 bytes a lane, counters of two kernels on an H200: docs/notes/backward-kernels.md).

    >>> wavefronts([4 * lane for lane in range(32)], 1), wavefronts([8 * lane for lane in range(32)], 2)
    (1, 2)
    >>> wavefronts([256 * lane for lane in range(32)], 1), wavefronts([0] * 32, 2)
    (32, 2)
    """
    words = [[place // 4 + i for i in range(registers)] for place in places if place is not None]
    if len(words) < _LANES:
        return 0
    lanes = _LANES // registers
    return sum(_fullest(words[i : i + lanes]) for i in range(0, _LANES, lanes))


def _fullest(words: Sequence[Sequence[int]]) -> int:
    """Different words in the bank that has most of them."""
    banks = Counter(word % _BANKS for word in {word for one in words for word in one})
    return max(banks.values())


def lane_bytes(modifiers: str) -> int:
    """Bytes of a lane, in whole registers; of a load of 32, as Blackwell has them, all."""
    return 32 if ".256" in modifiers else 16 if ".128" in modifiers else 8 if ".64" in modifiers else 4


def _last(code: Instruction) -> int:
    found = _NUMBER.search(code.operands)
    return int(found.group(0), 16) if found else 0
