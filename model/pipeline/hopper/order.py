"""In which order a warpgroup of Hopper's forward kernels does a step, as compiled.

Sources do not say it: ptxas moves waits and arithmetic.  All of this was counted in the machine code of the 524 recorded
generated kernels that do not spill much; FlashAttention-3's and FlashAttention-4's own for Hopper have 65 to 85 % of their
exponentials behind the wait for PV, as these rules say of them.

- With overlap P is packed when QK is issued: QK, packing, PV.
- The wait for PV of an unmasked loop stands about `head_dim_v` cycles of arithmetic behind the wait for S, whatever the tile:
  so long the compiler takes the last product to last.  Before it come the row max and what is left of that in exponentials
  ("conditional": none, for its vote follows the wait).  In masked loops, whose body the mask's branch cuts, the wait stands
  before the softmax of "always", behind the row max of "conditional", and behind an eighth of the exponentials of "anchored".
- Without overlap unmasked loops issue PV's instructions amid exponentials, the last of them behind all that stand under PV;
  "always" has four tenths of them before PV, "conditional" half behind it.  Masked loops do the softmax behind PV, but for the
  row max of "conditional".
- E4m3 kernels that add P V to O outside the matrix unit, without overlap, are written and compiled in another order: P V, the sum
  with O that rescales it, then QK and all of the softmax, in which P is packed.
- Sums and the rescale of O come in one run behind the exponentials; "anchored" mixes the sums in.
"""

from __future__ import annotations

from tilecast.model.kernel.alike import with_knobs
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Step

#: Rows of a wgmma, and so of a warpgroup.
ROWS = 64
#: Share of the exponentials that stand early, by rescale: before PV (without overlap, unmasked; "conditional": under PV), and
#: before the wait for PV (with overlap, masked).
_BEFORE_PV = {"always": 0.4, "conditional": 0.5, "anchored": 0.0}
_BEFORE_MASKED_WAIT = {"always": 0.0, "conditional": 0.0, "anchored": 0.125}
#: Operations that belong to the block before the one whose S a lap computes.
_OF_BLOCK_BEFORE = ("pack", "pv", "pva", "pvb", "have_o")


_ALL_IN_MUFU = {"emulated_share": 0.0, "poly_degree": 3}


def takes_turns(v: Fa3Variant) -> bool:
    """Whether warpgroups pass a turn on."""
    return v.ping_pong and v.warpgroups > 1


def adds_first(w: Workload, v: Fa3Variant) -> bool:
    """Whether O takes a block's product in before the next S is made."""
    return w.dtype == "fp8" and v.rescale == "always" and not v.overlap


def quad_cycles(m: Machine) -> float:
    """Latency that closes a reduction of rows: they sit on quads of threads, two dependent shuffles and maxima."""
    return 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])


def exp_parts(w: Workload, v: Fa3Variant, m: Machine) -> dict[str, float]:
    """Parts in which the exponentials of a block are done -> their shares: "a" and "b", or "" for all at once."""
    early = _early_share(w, v, m)
    return {"a": early, "b": 1.0 - early} if 0.0 < early < 1.0 else {"": 1.0}


def pv_parts(w: Workload, v: Fa3Variant) -> dict[str, int]:
    """Parts in which PV is issued -> keys of the block: the last instruction apart where exponentials stand before it."""
    last = 32 // w.dtype_bytes
    if v.overlap or w.mask != "none" or v.tile_n <= last or adds_first(w, v):
        return {"": v.tile_n}
    return {"a": v.tile_n - last, "b": last}


def _early_share(w: Workload, v: Fa3Variant, m: Machine) -> float:
    """Share of a block's exponentials before the wait for PV; without overlap before PV, of "conditional" under it."""
    if adds_first(w, v):
        return 0.0
    if not v.overlap:
        return _BEFORE_PV[v.rescale] if w.mask == "none" else 0.0
    if w.mask != "none":
        return _BEFORE_MASKED_WAIT[v.rescale]
    if v.rescale == "conditional":
        return 0.0
    elements = float(ROWS * v.tile_n)
    left = float(w.head_dim_v)
    if v.rescale == "always":
        left -= common.row_max_work(m, elements).busiest() + quad_cycles(m)
    exponentials = common.exp_work(m, w, elements, v.emulated_share, v.poly_degree, packed=False)
    return min(1.0, max(0.0, left / exponentials.busiest()))


def same_order(w: Workload, v: Fa3Variant) -> Fa3Variant:
    """A variant whose operations stand and wait in the same order, the same one for all shares of emulated exponentials where these do
    not move the wait for PV (`_early_share`)."""
    moves = v.overlap and w.mask == "none" and v.rescale != "conditional" and not adds_first(w, v)
    return v if moves else with_knobs(v, _ALL_IN_MUFU)


def program(w: Workload, v: Fa3Variant, m: Machine, *, spills: bool) -> tuple[Step, ...]:
    """One lap of warpgroup 0: QK of the next block and PV of this one, then the next block's softmax and the rescale of O.

    Warpgroups that take turns hold theirs until both products are issued, without overlap until they are waited for.
    """
    lap = ["begin", "turn", "ahead", *_products_and_softmax(w, v, m)]
    before = ("pv", "have_o", "rescale") if adds_first(w, v) else _OF_BLOCK_BEFORE
    if v.rescale != "anchored" and "rescale" not in lap:
        lap.append("rescale")
    if spills:
        lap.append("spill")
    left_out = set() if takes_turns(v) else {"begin", "turn", "pass"}
    return tuple(Step(_named(name), 0 if name in before else 1) for name in lap if name not in left_out)


def _products_and_softmax(w: Workload, v: Fa3Variant, m: Machine) -> list[str]:
    exps = [f"exp{part}" for part in exp_parts(w, v, m)]
    early, late = (exps[:1], exps[1:]) if _early_share(w, v, m) > 0.0 else ([], exps)
    maximum = [] if v.rescale == "anchored" else ["max"]
    masked = w.mask != "none"
    if adds_first(w, v):
        return ["pv", "have_o", "rescale", "qk", "have_s", "pass", *maximum, *exps, "pack"]
    if v.overlap:
        if masked and v.rescale == "always":
            return ["qk", "pack", "pv", "pass", "have_s", "have_o", *maximum, *exps]
        return ["qk", "pack", "pv", "pass", "have_s", *maximum, *early, "have_o", *late]
    if masked:
        under, behind = (maximum, []) if v.rescale == "conditional" else ([], maximum)
        return ["qk", "pack", "have_s", "pv", *under, "have_o", "pass", *behind, *exps]
    *issued, last = [f"pv{part}" for part in pv_parts(w, v)]
    if v.rescale == "conditional":
        return ["qk", "have_s", *maximum, "pack", *issued, *early, last, "have_o", "pass", *late]
    return ["qk", "have_s", *maximum, *early, "pack", *issued, *late, last, "have_o", "pass"]


def _named(name: str) -> str:
    """The operation of warpgroup 0: the part, if any, comes last."""
    stem = next((stem for stem in ("exp", "pv") if name.startswith(stem)), name)
    return f"{stem}0{name[len(stem) :]}"
