"""The GPU at hand through NVIDIA's own bindings: open, load, launch, read back, time.  Never changes a setting."""

from __future__ import annotations

import ctypes
import datetime
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilecast.validation.lab.calibrate.errors import CalibrateError
from tilecast.validation.lab.calibrate.nvrtc import ARCHES, compile_cubin

#: Numbers in a warp's record: clock at start and end, nanoseconds at start and end, SM, two extras, valid.
RECORD = 8
_DATA_BYTES = 6 << 30
_OUT_BYTES = 32 << 20
_ALIGN = 1 << 20
Records = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a row must say about where it was measured."""

    name: str
    driver: str
    compute_capability: int
    sm_count: int
    l2_bytes: int
    smem_per_cta: int
    clock_mhz: float


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid and block sizes in CTAs and threads, dynamic shared memory in bytes, and the kernel's numbers."""

    grid: int
    block: int
    smem: int = 0
    size: int = 0
    rounds: int = 1
    tensor_map: bytes = bytes(128)
    #: Offset of ``data`` into the big buffer.
    offset: int = 0


class Source(Protocol):
    """A kernel called ``bench`` in CUDA: a `cases.Case`."""

    def text(self) -> str:
        """Its source."""


class Gpu:
    """One CUDA device with a context, a large zeroed buffer and an output buffer."""

    def __init__(self, index: int = 0) -> None:
        self._cu = _driver()
        self._do(self._cu.cuInit(0))
        self._device = self._do(self._cu.cuDeviceGet(index))
        self._context = self._do(self._cu.cuDevicePrimaryCtxRetain(self._device))
        self._do(self._cu.cuCtxSetCurrent(self._context))
        self.identity = self._identify()
        if self.identity.compute_capability not in ARCHES:
            known = ", ".join(str(x) for x in ARCHES)
            raise CalibrateError(
                f"{self.identity.name} has compute capability {self.identity.compute_capability}; known: {known}"
            )
        #: As NVML and CUDA_VISIBLE_DEVICES take it.
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(self._do(self._cu.cuDeviceGetUuid(self._device)).bytes))}"
        self.arch = ARCHES[self.identity.compute_capability]
        free, _ = self._do(self._cu.cuMemGetInfo())
        self.data_bytes = min(_DATA_BYTES, int(free) // 2)
        self.data = int(self._do(self._cu.cuMemAlloc(self.data_bytes)))
        self._do(self._cu.cuMemsetD8(self.data, 0, self.data_bytes))
        # The first megabyte holds the values that arithmetic streams read: small normals, never denormal.
        rng = np.random.default_rng(0)
        self.fill(0, (rng.standard_normal(1 << 18) * 0.5).astype(np.float32).tobytes())
        self.out = int(self._do(self._cu.cuMemAlloc(_OUT_BYTES)))
        self._modules: dict[str, Any] = {}
        self._fresh = 0

    def _do(self, answer: Any) -> Any:
        error, *rest = answer
        if int(error) != 0:
            raise GpuError(f"CUDA driver: {error.name if hasattr(error, 'name') else error}")
        return rest[0] if len(rest) == 1 else tuple(rest)

    def _identify(self) -> Identity:
        attribute = self._cu.CUdevice_attribute
        prefix = "CU_DEVICE_ATTRIBUTE_"

        def ask(name: str) -> int:
            return int(self._do(self._cu.cuDeviceGetAttribute(getattr(attribute, prefix + name), self._device)))

        name = self._do(self._cu.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        return Identity(
            name,
            _driver_version(),
            10 * ask("COMPUTE_CAPABILITY_MAJOR") + ask("COMPUTE_CAPABILITY_MINOR"),
            ask("MULTIPROCESSOR_COUNT"),
            ask("L2_CACHE_SIZE"),
            ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            ask("CLOCK_RATE") / 1000.0,
        )

    def fill(self, offset: int, content: bytes) -> None:
        """Copy ``content`` to the big buffer."""
        self._do(self._cu.cuMemcpyHtoD(self.data + offset, content, len(content)))

    def randomize(self, offset: int, size: int) -> None:
        """Fill ``size`` bytes of the big buffer from ``offset`` with about normal bf16 numbers."""
        seed = (np.random.default_rng(1).standard_normal(8 << 20).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        self.fill(offset, seed.tobytes())
        done = seed.nbytes
        while done < size:
            more = min(done, size - done)
            self._do(self._cu.cuMemcpyDtoD(self.data + offset + done, self.data + offset, more))
            done += more
        self.wait()

    def copy(self, to: int, offset: int, size: int) -> None:
        """Start the driver's own copy inside the big buffer."""
        self._do(self._cu.cuMemcpyDtoDAsync(self.data + to, self.data + offset, size, 0))

    def kernel(self, case: Source, cubin: bytes | None = None) -> Any:
        """The case's kernel, compiled (unless ``cubin`` is given) and loaded once."""
        text = case.text()
        if text not in self._modules:
            module = self._do(self._cu.cuModuleLoadData(cubin or compile_cubin(text, self.arch)))
            function = self._do(self._cu.cuModuleGetFunction(module, b"bench"))
            self._modules[text] = function
        return self._modules[text]

    def start(self, function: Any, launch: Launch, stream: Any = 0) -> None:
        """Launch without waiting."""
        which = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # Static shared memory counts towards the 48 KB that need no permission.
        if launch.smem > 32 << 10:
            self._do(self._cu.cuFuncSetAttribute(function, which, launch.smem))
        # The driver copies the arguments before the call returns; alignment of the map is the driver's concern.
        held = (
            ctypes.create_string_buffer(launch.tensor_map, 128),
            ctypes.c_void_p(self.out),
            ctypes.c_void_p(self.data + launch.offset),
            ctypes.c_int64(launch.size),
            ctypes.c_int(launch.rounds),
        )
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        self._do(
            self._cu.cuLaunchKernel(
                function, launch.grid, 1, 1, launch.block, 1, 1, launch.smem, stream, ctypes.addressof(pointers), 0
            )
        )

    def wait(self) -> None:
        """Until everything launched has finished; GpuError when a kernel failed."""
        self._do(self._cu.cuCtxSynchronize())

    def alive(self) -> bool:
        """Whether the context still takes work after a failed kernel."""
        return int(self._cu.cuCtxSynchronize()[0]) == 0

    def records(self, case: Source, launch: Launch, tail: int = 0) -> tuple[Records, Records]:
        """Run once: the records as (CTAs, warps, RECORD), and ``tail`` numbers after them."""
        function = self.kernel(case)
        warps = (launch.block + 31) // 32
        count = launch.grid * warps * RECORD + tail
        self._do(self._cu.cuMemsetD8(self.out, 0, count * 8))
        self.start(function, launch)
        self.wait()
        host = np.empty(count, dtype=np.int64)
        self._do(self._cu.cuMemcpyDtoH(host.ctypes.data, self.out, count * 8))
        split = launch.grid * warps * RECORD
        return host[:split].reshape(launch.grid, warps, RECORD), host[split:]

    def last_records(self, launch: Launch) -> Records:
        """Records of the kernel that ran last, launched as ``launch``: (CTAs, warps, RECORD)."""
        host = np.empty((launch.grid, (launch.block + 31) // 32, RECORD), dtype=np.int64)
        self._do(self._cu.cuMemcpyDtoH(host.ctypes.data, self.out, host.nbytes))
        return host

    def last_span(self) -> tuple[float, float]:
        """(cycles, nanoseconds) of the first warp of the last kernel that noted both; zeros when it did not."""
        host = np.empty(RECORD, dtype=np.int64)
        self._do(self._cu.cuMemcpyDtoH(host.ctypes.data, self.out, RECORD * 8))
        return float(host[1] - host[0]), float(host[3] - host[2])

    def milliseconds(self, body: Callable[[], None]) -> float:
        """Time between events around ``body``'s launches."""
        first, last = (self._do(self._cu.cuEventCreate(0)) for _ in range(2))
        self._do(self._cu.cuEventRecord(first, 0))
        body()
        self._do(self._cu.cuEventRecord(last, 0))
        self._do(self._cu.cuEventSynchronize(last))
        return float(self._do(self._cu.cuEventElapsedTime(first, last)))

    def graph(self, case: Source, launch: Launch, count: int) -> Callable[[], None]:
        """A CUDA graph of ``count`` launches, one after the other, as something to call."""
        function = self.kernel(case)
        stream = self._do(self._cu.cuStreamCreate(1))
        self._do(self._cu.cuStreamBeginCapture(stream, self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        for _ in range(count):
            self.start(function, launch, stream)
        graph = self._do(self._cu.cuStreamEndCapture(stream))
        ready = self._do(self._cu.cuGraphInstantiate(graph, 0))
        return lambda: self._do(self._cu.cuGraphLaunch(ready, 0))

    def fresh(self, size: int) -> int:
        """Offset of ``size`` bytes in the buffer's second half that have not been read for gigabytes: not in L2.

        A flush by writing would not do: reads would then wait for dirty lines to leave.
        """
        size = -(-size // _ALIGN) * _ALIGN
        half = self.data_bytes // 2 // _ALIGN * _ALIGN
        if size > half:
            raise CalibrateError(f"{size >> 20} MB of untouched memory asked, the device lends {half >> 20}")
        if self._fresh + size > half:
            self._fresh = 0
        at = half + self._fresh
        self._fresh += size
        return at

    def tensor_map(self, rows: int, box_rows: int, offset: int = 0, *, floats: bool = False) -> bytes:
        """A map of (rows, 64) bf16, or (rows, 32) float32, from ``offset`` of the big buffer, boxes of ``box_rows`` x 128 bytes,
        128 B swizzle."""
        cu = self._cu
        kinds = cu.CUtensorMapDataType
        kind, columns = (
            (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 32) if floats else (kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 64)
        )
        answer = self._do(
            cu.cuTensorMapEncodeTiled(
                kind, 2, self.data + offset,
                [cu.cuuint64_t(columns), cu.cuuint64_t(rows)], [cu.cuuint64_t(128)],
                [cu.cuuint32_t(columns), cu.cuuint32_t(box_rows)], [cu.cuuint32_t(1), cu.cuuint32_t(1)],
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )  # fmt: skip
        return ctypes.string_at(answer.getPtr(), 128)


class GpuError(RuntimeError):
    """A CUDA call that failed while a benchmark ran; the context may be lost."""


def _driver() -> Any:
    try:
        from cuda.bindings import driver

        error = driver.cuInit(0)[0]
        count = driver.cuDeviceGetCount()[1] if int(error) == 0 else 0
    except ImportError:
        raise CalibrateError("calibrate needs NVIDIA's cuda-bindings package: pip install 'tilecast[gpu]'") from None
    except Exception:  # the binding's own kinds, when the driver's library is absent
        raise CalibrateError("calibrate needs an NVIDIA GPU, and this machine has no NVIDIA driver") from None
    if not count:
        raise CalibrateError("calibrate needs an NVIDIA GPU, and the driver finds none")
    return driver


def _driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return "unknown"


def today() -> str:
    """ISO date of a row."""
    return datetime.date.today().isoformat()
