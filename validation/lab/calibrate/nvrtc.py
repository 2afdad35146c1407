"""CUDA text to machine code with NVRTC: no GPU and no driver needed.  The only place that calls the compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_CU = Path(__file__).parent / "cu"
#: Compute capability -> architecture name; matrix instructions need the ones ending in a.
ARCHES = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}


class CompileError(ValueError):
    """A benchmark's source that the compiler refused, or a missing compiler; one sentence."""


def available() -> bool:
    """Whether NVRTC can be loaded on this machine."""
    try:
        return bool(_api().nvrtcVersion()[0] == 0)
    except CompileError:
        return False


@lru_cache(maxsize=1)
def _api() -> Any:
    """The binding's module, or CompileError that says what to install."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # the binding raises its own kinds when the shared library is absent
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CompileError(
            f"calibrate compiles its benchmarks with NVRTC, which is not here ({first}): pip install 'tilecast[gpu]'"
        ) from None
    return nvrtc


@lru_cache(maxsize=64)
def _file(name: str) -> str:
    return (_CU / name).read_text(encoding="utf-8")


def source_text(name: str, prelude: str, defines: Mapping[str, int | str]) -> str:
    """The whole text of a benchmark: definitions, the common part, the generated prelude, the question's own file."""
    lines = [f"#define {key} {value}" for key, value in sorted(defines.items())]
    matrix = _file("wgmma.cuh") if "wgmma(float" in prelude else ""
    return "\n".join([*lines, _file("common.cuh"), prelude, matrix, _file(name)])


def source_sha(text: str) -> str:
    """First 12 hexadecimal digits of the SHA-256 of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compile_cubin(text: str, arch: str) -> bytes:
    """Machine code of ``text`` for ``arch`` (such as "sm_90a"); CompileError with the compiler's first complaint."""
    api = _api()
    error, program = api.nvrtcCreateProgram(text.encode(), b"bench.cu", 0, [], [])
    if error != 0:
        raise CompileError(f"NVRTC could not start: {error}")
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-default-device"]
    (error,) = api.nvrtcCompileProgram(program, len(options), options)
    if error != 0:
        _, size = api.nvrtcGetProgramLogSize(program)
        log = b" " * size
        api.nvrtcGetProgramLog(program, log)
        lines = [x for x in log.decode(errors="replace").splitlines() if "error" in x.lower() or "fatal" in x.lower()]
        raise CompileError(f"NVRTC refused a benchmark for {arch}: {lines[0] if lines else error}")
    _, size = api.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    (error,) = api.nvrtcGetCUBIN(program, cubin)
    api.nvrtcDestroyProgram(program)
    if error != 0 or size == 0:
        raise CompileError(f"NVRTC gave no machine code for {arch}: {error}")
    return bytes(cubin)
