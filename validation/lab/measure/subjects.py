"""What can be measured: generated variants, kernel files, and the peers that users compare with.

A subject turns the tensors of a shape into a function of no arguments that launches it once.  Layout (batch, heads,
seqlen, head_dim) for all; a peer that wants another layout gets its own contiguous copy, made once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tilecast.base.files import cache_folder, write_text_atomically
from tilecast.base.module_file import module_of
from tilecast.kernels.launching import launcher
from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.plan import EXTERNAL, Item, PlanError

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: A launch without arguments, and the tensor it writes in (batch, heads, seqlen, head_dim).
Launch = Callable[[], None]


#: Folder of the cache where generated sources are kept, so that Triton's compile cache finds them again.
CACHE = "measured-kernels"


@dataclass(frozen=True)
class Subject:
    """A kernel ready to be given tensors."""

    kernel: str
    variant: str
    source_sha: str
    prepare: Callable[[Workload, Tensors], tuple[Launch, Callable[[], torch.Tensor]]]


def subject(item: Item, version: str) -> Subject:
    """The subject of a plan item; PlanError when its kernel cannot be written or is not installed."""
    if item.kernel == "file":
        return _from_file(Path(item.variant), item.kernel, item.variant)
    if item.kernel in EXTERNAL:
        return _external(item.kernel)
    from tilecast.codegen.generate import generate
    from tilecast.model.families import find_family, parse_variant
    from tilecast.model.kernel.header import without_header
    from tilecast.model.machine.machine import load_machine

    family = find_family(item.kernel)
    variant = parse_variant(f"family={family.name},{item.variant.removeprefix('family=' + family.name + ',')}")
    # The source must not depend on the length, so that one compilation serves all lengths of a shape.
    source = generate(item.workload, load_machine(item.machine), family, variant, version, compiler=None).source
    sha = hashlib.sha256(without_header(source).encode()).hexdigest()[:16]
    folder = cache_folder(CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{item.kernel}_{sha}.py"
    if not path.exists():
        write_text_atomically(path, source)
    return _from_file(path, item.kernel, item.variant, sha)


def _from_file(path: Path, kernel: str, variant: str, sha: str = "") -> Subject:
    try:
        digest = sha or hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise PlanError(f"{path}: cannot read the kernel: {error.strerror or error}") from None
    name = f"tilecast_measured_{digest}"
    module = sys.modules.get(name)
    if module is None:
        module = module_of(path, name, registered=True)
    launch = getattr(module, "launch", None)
    if launch is None:
        raise PlanError(f"{path}: has no function launch(q, k, v, out, lse, scale): generate it with tilecast generate")
    if hasattr(module, "workspaces"):
        return Subject(kernel, variant, digest, partial(_of_bytes, module, bool(sha)))
    if hasattr(module, "plan"):
        # As the operator launches it: what a shape needs is worked out once, outside of what is timed.
        launch = launcher(module)

    def prepare(work: Workload, tensors: Tensors) -> tuple[Launch, Callable[[], torch.Tensor]]:
        q, k, v = tensors
        out = torch.full((*q.shape[:3], work.head_dim_v), float("nan"), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        # What is generated for a window that hides nothing is a plainer kernel, which takes no limits.
        window = (work.reduced() if sha else work).window or ()
        scale = work.head_dim_qk**-0.5
        return (lambda: launch(q, k, v, out, lse, scale, *window)), (lambda: out)

    return Subject(kernel, variant, digest, prepare)


def _of_bytes(
    module: Any, generated: bool, work: Workload, tensors: Tensors
) -> tuple[Launch, Callable[[], torch.Tensor]]:
    """Attention in e4m3.  Hopper's files launch a pass over V before it: that one once, outside of what is timed."""
    q, k, v = tensors
    out = torch.full((*q.shape[:3], work.head_dim_v), float("nan"), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    window = (work.reduced() if generated else work).window or (-1, -1)
    *first, (attention, programs, arguments) = module.plan(
        q, k, v, out, lse, None, None, None, *module.workspaces(v), *window
    )
    for kernel, grid, before in first:
        kernel[grid](*before, num_warps=module.PREPARE_WARPS)
    scale = work.head_dim_qk**-0.5 * module.LOG2E
    return (lambda: attention[programs](*arguments, scale, **module.OPTIONS)), (lambda: out)


def _external(name: str) -> Subject:
    version, call = {
        "cudnn": _sdpa("CUDNN_ATTENTION"),
        "flash-attn-2": _sdpa("FLASH_ATTENTION"),
        "flash-attn-4": _flash_attn_4,
        "flex": _flex,
    }[name]()

    def prepare(work: Workload, tensors: Tensors) -> tuple[Launch, Callable[[], torch.Tensor]]:
        run = call(work, tensors)
        last: list[Any] = [None]

        def launch() -> None:
            last[0] = run()

        return launch, lambda: last[0]

    return Subject(name, version, "", prepare)


def _unmasked_only(name: str, work: Workload) -> None:
    if work.mask == "window":
        raise PlanError(f"{name}: has no sliding window here; leave it out for {work.label()}")


def _sdpa(backend: str) -> Callable[[], tuple[str, Any]]:
    def make() -> tuple[str, Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        version = str(torch.backends.cudnn.version()) if backend.startswith("CUDNN") else torch.__version__

        def call(work: Workload, tensors: Tensors) -> Callable[[], torch.Tensor]:
            _unmasked_only(backend, work)
            q, k, v = tensors

            def run() -> torch.Tensor:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=work.mask == "causal", enable_gqa=work.group_size > 1
                    )

            return run

        return version, call

    return make


def _flex() -> tuple[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Beyond the limit torch.compile falls back to an unfused path: no peer, a straw man.
    torch._dynamo.config.recompile_limit = 1000
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(work: Workload, tensors: Tensors) -> Callable[[], torch.Tensor]:
        q, k, v = tensors
        left, right = work.limits
        offset = work.seqlen_k - work.seqlen_q

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            keep = j <= i + offset + right if right >= 0 else j >= 0
            return keep & (j >= i + offset - left) if left >= 0 else keep

        mask = None if work.mask == "none" else create_block_mask(visible, None, None, work.seqlen_q, work.seqlen_k)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=work.group_size > 1)

    return torch.__version__, call


def _flash_attn_4() -> tuple[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        from flash_attn.cute import flash_attn_func

        number = version("flash-attn-4")
    except (ImportError, PackageNotFoundError) as error:
        raise PlanError(f"flash-attn-4: not installed ({error}): pip install --pre flash-attn-4") from None

    def call(work: Workload, tensors: Tensors) -> Callable[[], torch.Tensor]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
        left, right = work.window or (None, None)

        def run() -> torch.Tensor:
            out = flash_attn_func(q, k, v, causal=work.mask == "causal", window_size=(left, right))
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return run

    return number, call
