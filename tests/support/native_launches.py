"""Launches in C beside Triton's own, on a driver that only notes them (stub_libcuda.c): a script, as Triton has one driver a process.

    python -m support.native_launches FOLDER

prints the version of Triton and, by name, what a check found wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

STUB = Path(__file__).with_name("stub_libcuda.c")


def install(folder: Path) -> ctypes.CDLL:
    """The stub as this process's libcuda, and Triton's driver on it."""
    import triton
    from triton.backends.nvidia import driver as nvidia

    made = folder / "libcuda.so.1"
    include = [f"-I{path}" for path in nvidia.include_dirs]
    command = ["gcc", "-shared", "-fPIC", "-w", *include, "-Wl,-soname,libcuda.so.1", "-o", str(made), str(STUB)]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda device: 0x70 + device
    triton.runtime.driver.set_active(nvidia.CudaDriver())
    return found


stub: ctypes.CDLL

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


@triton.jit
def kernel(wide, flat, out, nothing, small, one, big, factor, flag, precise, KIND: tl.constexpr):  # noqa: N803
    tile = wide.load([0, 0, 0]).reshape([16, 64]).to(tl.float32)
    tile += flat.load([0]).to(tl.float32)[None, :] * factor + precise.to(tl.float32)
    if nothing is not None:
        tile += tl.load(nothing)
    at = tl.arange(0, 16)[:, None] * (small + one) + tl.arange(0, 64)[None, :] + big
    tl.store(out + at, tile + (1.0 if KIND else 0.0), mask=flag != 0)


def call() -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors of a call, and the kernel's arguments of them."""
    wide = torch.zeros(3, 48, 128, dtype=torch.bfloat16)
    flat, out = torch.zeros(1 << 20, dtype=torch.float16)[64:], torch.zeros(16, 64)
    described = TensorDescriptor.from_tensor(wide, [1, 16, 64]), TensorDescriptor.from_tensor(flat, [64])
    return [wide, flat, out], [*described, out, None, 7, 1, 1 << 40, 0.1, 3, 2.5, True]


#: Places among the arguments: of the tensors, and of numbers that a call may change.
TENSORS = {0: 0, 1: 1, 2: 2}
NUMBERS = {7: 3, 4: 4, 6: 5}
#: Sizes of the parameters: a map, extents and strides for each descriptor, then what is no constant.
SIZES = [128, 4, 4, 4, 8, 8, 8, 128, 4, 8, 8, 4, 8, 4, 4, 4]
GRID = (5, 3, 2)
EXTRA = [0.25, 11, 1 << 41]


def compiled() -> Any:
    _, arguments = call()
    return kernel.warmup(*arguments, grid=GRID, num_warps=8)


def starters(one: Any, takes: dict[int, int], given: int) -> tuple[Any, Any]:
    """(in C, by Triton)."""
    from tilecast.kernels import starting
    from tilecast.kernels.native.prepare import prepared

    _, arguments = call()
    by_triton = starting._by_triton(one[GRID], arguments, takes)
    return prepared(one, GRID, arguments, takes, given, by_triton), by_triton


def said(start: Any, *given: Any) -> bytes:
    """What the driver was told by a launch."""
    before = count("launches")
    start(*given)
    assert count("launches") == before + 1
    stub.stub_said.restype = ctypes.c_void_p
    return ctypes.string_at(stub.stub_said(), stub.stub_said_bytes())


def count(what: str) -> int:
    return ctypes.c_int.in_dll(stub, f"stub_{what}").value


def put(what: str, value: int) -> None:
    ctypes.c_int.in_dll(stub, f"stub_{what}").value = value


def raised(start: Any, *given: Any) -> tuple[type, str] | None:
    try:
        start(*given)
    except Exception as error:
        return type(error), str(error)
    return None  # Triton 3.9 cuts numbers off


def check_bytes() -> None:
    """Parameters, configuration and attributes are Triton's, byte for byte, whatever changes."""
    one = compiled()
    warps, _, shared = kept = one.packed_metadata
    for clusters, overlaps, cooperative in ((1, False, False), (2, True, False), (4, False, True)):
        one.packed_metadata = (warps, clusters, shared)
        one.run.launch_pdl, one.run.launch_cooperative_grid = overlaps, cooperative
        fast, slow = starters(one, {**TENSORS, **NUMBERS}, 6)
        assert fast is not None
        for numbers in (EXTRA, [-1e30, -5, -(1 << 50)], [float("inf"), 2**31 - 1, 1 << 33]):
            tensors, _ = call()
            fast_said, slow_said = said(fast, *tensors, *numbers), said(slow, *tensors, *numbers)
            assert fast_said == slow_said
            # As the driver was given the addresses that the device reads: a sum of the stub's.
            assert struct.pack("<Q", tensors[2].data_ptr() + (1 << 48)) in fast_said
    one.packed_metadata = kept
    one.run.launch_pdl = one.run.launch_cooperative_grid = False
    # Numbers that stay.
    fast, slow = starters(compiled(), TENSORS, 3)
    tensors, _ = call()
    assert said(fast, *tensors) == said(slow, *tensors)


def check_maps_only_where_tensors_moved() -> None:
    fast, slow = starters(compiled(), TENSORS, 3)
    (wide, flat, out), (other, *_) = call()[0], call()[0]
    fast(wide, flat, out)
    maps, pointers = count("maps"), count("pointers")
    fast(wide, flat, out)
    fast(wide.view(wide.shape), flat, out)
    assert (count("maps"), count("pointers")) == (maps, pointers)
    fast(other, flat, out)
    assert count("maps") == maps + 1
    fast(wide, flat, out)
    assert count("maps") == maps + 2
    assert said(fast, other, flat, out) == said(slow, other, flat, out)
    # Parameters are tensors of another type: found through data_ptr.
    kept = torch.nn.Parameter(other, requires_grad=False)
    assert said(fast, kept, flat, out) == said(slow, other, flat, out)


def check_errors() -> None:
    class Off:
        """A tensor's place that the driver refuses."""

        def __init__(self, address: int) -> None:
            self.address = address

        def data_ptr(self) -> int:
            return self.address

    fast, slow = starters(compiled(), {**TENSORS, **NUMBERS}, 6)
    (wide, flat, out), _ = call()
    for given in (
        (wide, flat, out, 0.5, 1 << 40, 1),
        (wide, flat, Off(0xBAD0), *EXTRA),
        (wide, Off(0x18), out, *EXTRA),
        (wide, flat, "no tensor", *EXTRA),
        (wide, flat, out, "no number", *EXTRA[1:]),
    ):
        found = raised(slow, *given)
        assert raised(fast, *given) == found and (found or given[4] == 1 << 40), given[3:]
    put("fails", 1)
    try:
        found = raised(fast, wide, flat, out, *EXTRA)
    finally:
        put("fails", 0)
    assert found == (RuntimeError, "Triton Error [CUDA]: invalid argument")
    assert said(fast, wide, flat, out, *EXTRA) == said(slow, wide, flat, out, *EXTRA)
    assert raised(fast, wide, flat) == (TypeError, "launch: expected 6 arguments, got 2")


def check_hooks_set_later() -> None:
    """A hook on Triton's launches sees ours, from the next one on."""
    from triton import knobs

    fast, _ = starters(compiled(), TENSORS, 3)
    (wide, flat, out), _ = call()
    fast(wide, flat, out)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    fast(wide, flat, out)
    knobs.runtime.launch_enter_hook.remove(hook)
    fast(wide, flat, out)
    assert seen == ["kernel"]
    chain = knobs.runtime.launch_exit_hook
    for given, calls in ((None, 1), (lambda metadata: seen.append("left"), 2)):
        knobs.runtime.launch_exit_hook = given
        fast(wide, flat, out)
        assert len(seen) == calls
    knobs.runtime.launch_exit_hook = chain


def check_stream_and_context() -> None:
    fast, _ = starters(compiled(), TENSORS, 3)
    (wide, flat, out), _ = call()
    put("without_context", 1)
    first = said(fast, wide, flat, out)
    assert not count("without_context") and count("contexts")
    assert struct.unpack_from("<2Q", first, 64) == (0x5678, 0x70)


def check_threads_and_leaks() -> None:
    """Launches of one plan in several threads carry their own tensors; none is kept, and no memory grows."""
    import gc
    import weakref

    starts = [*starters(compiled(), TENSORS, 3)]
    slow = starts[1]
    sets = [call()[0] for _ in range(4)]

    def run(given: list[torch.Tensor]) -> None:
        for _ in range(500):
            starts[0](*given)

    threads = [threading.Thread(target=run, args=(given,)) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said(starts[0], *sets[1]) == said(slow, *sets[1])
    kept = [weakref.ref(tensor) for given in sets for tensor in given]
    before = sys.getrefcount(sets[0][0])
    starts[0](*sets[0])
    assert sys.getrefcount(sets[0][0]) == before
    sets.clear()
    gc.collect()
    assert [found() for found in kept] == [None] * 12
    gone = weakref.ref(slow)
    starts.clear()
    del slow
    gc.collect()
    assert gone() is None


def check_left_to_triton() -> None:
    """What launch.c does not know starts as ever."""
    from tilecast.kernels.native import library as found
    from tilecast.kernels.native import prepare

    one = compiled()
    run = one.run
    for name, value in (("global_scratch_size", 64), ("profile_scratch_size", 64)):
        kept = getattr(run, name)
        setattr(run, name, value)
        assert starters(one, TENSORS, 3)[0] is None, name
        setattr(run, name, kept)
    assert starters(one, {0: 0, 1: 1}, 2)[0] is None  # a pointer that stays
    assert starters(one, {1: 1, 2: 2}, 3)[0] is None  # a descriptor that stays
    assert starters(one, TENSORS, 3)[0] is not None
    _, arguments = call()
    assert prepare.prepared(one, (0, 1, 1), arguments, TENSORS, 3, None) is None
    assert prepare.prepared({GRID: None}, GRID, arguments, TENSORS, 3, None) is None
    for change in (lambda: os.environ.update(TILECAST_LAUNCH="triton"), lambda: setattr(found, "TRITONS", ())):
        kept = found.TRITONS
        found.library.cache_clear()
        change()
        assert found.library() is None
        os.environ.pop("TILECAST_LAUNCH", None)
        found.TRITONS = kept
    found.library.cache_clear()


def check_facts() -> None:
    """Two sets of tensors have the same facts where all that plans ask of them is the same."""
    from tilecast.kernels.native.library import library

    facts = library().facts
    x = torch.zeros(4, 8, 32, dtype=torch.bfloat16)
    alike = (x, x.clone(), x.clone(), None)
    found = facts(alike, False)
    assert isinstance(found, bytes) and found == facts((x.clone(), x.clone(), x.clone(), None), False)
    shifted = torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape)
    others = [
        x.half(), x.view(torch.int16), x[:2], x.transpose(0, 1), x[None], shifted, x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2),
        None,
    ]  # fmt: skip
    seen = {found} | {facts((x, other, alike[2], None), False) for other in others}
    assert len(seen) == len(others) + 1 and None not in seen
    assert facts((x, x, x, None), False) not in (None, found)  # the values are the keys
    assert facts(alike, True) not in (None, found)
    wanted = x.float().requires_grad_()
    assert facts((wanted, *alike[1:]), True) is None and facts((wanted, *alike[1:]), False) is not None
    for odd in (torch.nn.Parameter(x), 3, x.to_sparse(), torch.zeros(1).as_subclass(torch.nn.Buffer)):
        assert facts((x, odd, x), False) is None
    assert facts(tuple(x for _ in range(80)), False) is None  # too many to look at


def check_without_the_exchange_table() -> None:
    """PyTorch before 2.10: addresses by data_ptr, and facts are Python's."""
    from tilecast.kernels.again import facts_of
    from tilecast.kernels.native.library import library

    native = library()
    fast, slow = starters(compiled(), TENSORS, 3)
    tensors, _ = call()
    assert native.know(torch.Tensor, None) is False
    try:
        assert native.facts(tuple(tensors), False) is None and facts_of(tuple(tensors), False) is not None
        assert said(fast, *tensors) == said(slow, *tensors)
    finally:
        assert native.know(torch.Tensor, torch.Tensor.__dlpack_c_exchange_api__) is True


def main() -> None:
    global stub
    stub = install(Path(sys.argv[1]))
    stub.stub_sizes(len(SIZES), (ctypes.c_int * len(SIZES))(*SIZES))
    wrong = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                wrong[name] = ""
            except Exception:
                wrong[name] = traceback.format_exc()
    print(json.dumps({"triton": triton.__version__, "wrong": wrong}))


if __name__ == "__main__":
    main()
