"""The blackwell_ws family: what its context decides, what its kernels compute, what they compile to.

There is no Blackwell GPU here, so kernels run on the emulator (`tilecast.emulator`).
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.whole import whole

from tilecast.codegen.blackwell import forward as blackwell_ws
from tilecast.codegen.blackwell import order as blackwell_order
from tilecast.codegen.render import render
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.language import ptx
from tilecast.emulator.run import emulate, load, new_session
from tilecast.emulator.source import Source
from tilecast.emulator.verify import reference
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.variants.fa4 import smem_bytes as fa4_smem_bytes
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.graph import Step

# --- helpers ------------------------------------------------------------------------------------------------------------


def source_of(variant: Fa4Variant, workload: Workload, machine: str = "b200", pipeline: Any = None) -> str:
    kernel = blackwell_ws.context(variant, workload, load_machine(machine), pipeline)
    facts = {"family": "blackwell_ws", "machine": machine, "workload": workload.as_dict()}
    header = f"TILECAST = { ({**facts, 'targets': ['sm_100a', 'sm_103a']})!r}"
    return render(blackwell_ws.TEMPLATE, {"k": kernel, "header": header})


def heads(dim_qk: int, dim_v: int = 0, mask: str = "none", window: tuple[int, int] | None = None) -> Workload:
    return Workload(head_dim_qk=dim_qk, head_dim_v=dim_v or dim_qk, mask=mask, window=window, heads_q=4, heads_kv=2)


def run(
    source: str,
    workload: Workload,
    seqlens: tuple[int, int],
    seed: int = 0,
    poison: bool = False,
    machine: str = "b200",
) -> tuple[Any, ...]:
    """(out, lse, expected out, expected lse) of the kernel on the emulator, at random moments."""
    rng = np.random.default_rng(seed)
    (sq, sk), w = seqlens, workload
    shapes = ((w.heads_q, sq, w.head_dim_qk), (w.heads_kv, sk, w.head_dim_qk), (w.heads_kv, sk, w.head_dim_v))
    q, k, v = (rng.standard_normal((1, *shape)).astype(np.float16) for shape in shapes)
    q[:, :, : sq // 2] *= 4  # sharp rows, whose maximum moves by more than the threshold
    if poison:
        q[0, 0, 7, 3], q[0, 1, 9, 3] = np.nan, np.inf
    window, scale = w.window or (-1, 0 if w.mask == "causal" else -1), w.head_dim_qk**-0.5
    done = emulate("generated", q, k, v, text=source, window=window, mode="random", seed=seed, sms=2, machine=machine)
    return done.out, done.lse, *reference(q, k, v, scale, window)


# --- what the context decides -------------------------------------------------------------------------------------------


def order(products: Any) -> list[tuple[str, int]]:
    return [(product.op, product.group) for product in products]


def test_matrix_order_comes_from_the_pipeline() -> None:
    pipeline = build_pipeline(heads(128), Fa4Variant(), load_machine("b200"))
    found = blackwell_order.matrix_order(pipeline, 2, by_keys=False)
    assert order(found.loop) == [("PV", 0), ("QK", 0), ("PV", 1), ("QK", 1)]
    assert order(found.first) == [("QK", 0), ("QK", 1)]
    assert order(found.last) == [("PV", 0), ("PV", 1)]
    changed = with_matrix_program(pipeline, ("pv1a", "pv1b", "pv0a", "pv0b", "qk1", "qk0"))
    found = blackwell_order.matrix_order(changed, 2, by_keys=False)
    assert order(found.loop) == [("PV", 1), ("PV", 0), ("QK", 1), ("QK", 0)]
    assert [product.takes for product in found.loop] == [True, False, True, False]
    assert [product.releases for product in found.loop] == [False, True, False, True]


def test_statements_follow_the_order() -> None:
    pipeline = build_pipeline(heads(128), Fa4Variant(), load_machine("b200"))
    changed = with_matrix_program(pipeline, ("pv1a", "pv1b", "pv0a", "pv0b", "qk1", "qk0"))
    kernel = blackwell_ws.context(Fa4Variant(), heads(128), load_machine("b200"), changed)
    assert kernel.mma.loop == (
        "v_slot, kv_at = take(kv, kv_at)",
        "issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)",
        "issue_pv(softmax0, tile_at(kv, v_slot), p_phase, step != 0)",
        "tcgen05_commit(kv.empty.index(v_slot))",
        "k_slot, kv_at = take(kv, kv_at)",
        "issue_qk(softmax1, tile_at(q, q1), tile_at(kv, k_slot))",
        "issue_qk(softmax0, tile_at(q, q0), tile_at(kv, k_slot))",
        "tcgen05_commit(kv.empty.index(k_slot))",
    )
    assert kernel.load.loop == (
        "kv_at = load(kv, kv_at, v_desc, batch, head_kv, key)",
        "kv_at = load(kv, kv_at, k_desc, batch, head_kv, key - TILE_N)",
    )


def with_matrix_program(pipeline: Any, names: tuple[str, ...]) -> Any:
    program = tuple(Step(name, 1 if name.startswith("qk") else 0) for name in names)
    roles = tuple(replace(role, program=program) if role.name == "mma" else role for role in pipeline.roles)
    return replace(pipeline, roles=roles)


def test_refuses_an_order_that_overwrites_p() -> None:
    workload, variant, machine = heads(128), Fa4Variant(), load_machine("b200")
    bad = with_matrix_program(
        build_pipeline(workload, variant, machine), ("pv0a", "qk0", "pv0b", "pv1a", "pv1b", "qk1")
    )
    with pytest.raises(VariantError, match="qk0 must come after pv0"):
        blackwell_ws.context(variant, workload, machine, bad)


@pytest.mark.parametrize(("dim_qk", "dim_v"), [(64, 64), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("group", [1, 2])
def test_rings_are_as_deep_as_the_model_says(dim_qk: int, dim_v: int, group: int) -> None:
    variant, workload, machine = Fa4Variant(cta_group=group), heads(dim_qk, dim_v), load_machine("b200")
    rings = blackwell_ws.context(variant, workload, machine).kv_rings
    assert sum(ring.slots for ring in rings) == fa4_smem_bytes(variant, workload, machine)[2]
    # K and V blocks of one size take turns in one ring; a pair divides K by rows and V by columns.
    assert len(rings) == (1 if dim_qk == dim_v and group == 1 else 2)


@pytest.mark.parametrize(
    ("variant", "dims"),
    [
        (Fa4Variant(), (128, 128)),
        (Fa4Variant(), (192, 128)),
        (Fa4Variant(), (96, 96)),
        (Fa4Variant(split="k"), (256, 256)),
        (Fa4Variant(tile_n=64), (64, 64)),
    ],
)
def test_tensor_memory_fits_and_does_not_overlap(variant: Fa4Variant, dims: tuple[int, int]) -> None:
    kernel = blackwell_ws.context(variant, heads(*dims), load_machine("b200"))
    end = 0
    for _name, start, columns in kernel.tmem_map:
        assert start == end
        end = start + columns
    assert end == kernel.tmem_columns <= 512


@pytest.mark.parametrize("share", [0.0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.703125, 1.0])
@pytest.mark.parametrize("tile_n", [64, 128])
def test_emulated_share_is_exact(share: float, tile_n: int) -> None:
    if share * tile_n / 2 % 1:
        pytest.skip("no whole pairs")
    columns = blackwell_ws.emulated_columns(Fa4Variant(emulated_share=share, tile_n=tile_n))
    assert all(len(set(c)) == len(c) and all(0 <= k < tile_n // 4 and k % 2 == 0 for k in c) for c in columns)
    assert 2 * sum(map(len, columns)) == share * tile_n
    assert not columns[3] or share > 0.75


def test_emulated_columns_follow_the_published_rule() -> None:
    assert blackwell_ws.emulated_columns(Fa4Variant(emulated_share=0.125)) == (
        (),
        (12, 14, 28, 30),
        (12, 14, 28, 30),
        (),
    )
    quarter = (6, 8, 16, 18, 26, 28)
    assert blackwell_ws.emulated_columns(Fa4Variant(emulated_share=0.1875)) == ((), quarter, quarter, ())


@pytest.mark.parametrize(
    ("variant", "workload", "message"),
    [
        (Fa4Variant(emulated_share=0.3), heads(128), "nearest: 0.296875 and 0.3125"),
        (Fa4Variant(softmax_tiles=3, tile_n=64), heads(64), "two softmax groups"),
        (Fa4Variant(tile_n=96), heads(128), "tile_n must be 64 or 128"),
        (Fa4Variant(poly_degree=2), heads(128), "poly_degree"),
        (Fa4Variant(scheduler="work-stealing"), heads(128), "scheduler"),
        (Fa4Variant(), heads(80), "multiple of 32"),
        (Fa4Variant(), heads(256), "split=k"),
        (Fa4Variant(load_max=True), heads(128), "load_max=false"),
        (Fa4Variant(split="k", stats_slots=2), heads(128), "stats_slots=1"),
    ],
)
def test_refusals_name_the_reason(variant: Fa4Variant, workload: Workload, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        blackwell_ws.context(variant, workload, load_machine("b200"))


# --- what the kernels compute ---------------------------------------------------------------------------------------------

CASES = {
    "full": (Fa4Variant(emulated_share=0.1875, scheduler="persistent"), heads(128), "b200", (300, 333)),
    "causal": (Fa4Variant(emulated_share=0.125, scheduler="longest-first"), heads(128, mask="causal"), "b200", (600, 700)),
    "rows without keys": (Fa4Variant(scheduler="longest-first"), heads(128, mask="causal"), "b200", (300, 130)),
    "window": (Fa4Variant(stats_slots=2, scheduler="persistent"), heads(128, mask="window", window=(100, 20)), "b200", (400, 500)),
    "one-sided window": (Fa4Variant(), heads(64, mask="window", window=(30, -1)), "b200", (400, 300)),
    "always rescale": (Fa4Variant(rescale_threshold=0.0, scheduler="persistent"), heads(64), "b200", (257, 500)),
    "one group": (Fa4Variant(softmax_tiles=1, split_p=False, scheduler="persistent"), heads(64, mask="causal"), "b200", (300, 500)),
    "narrow blocks": (Fa4Variant(tile_n=64, poly_degree=5, emulated_share=0.25), heads(128, mask="causal"), "b200", (300, 400)),
    "odd width": (Fa4Variant(scheduler="persistent"), heads(96, mask="causal"), "b200", (300, 500)),
    "uneven heads": (Fa4Variant(scheduler="persistent"), heads(192, 128), "b200", (300, 400)),
    "alternate keys": (Fa4Variant(split="k", emulated_share=0.25, scheduler="persistent"), heads(256), "b200", (200, 500)),
    "alternate keys, causal": (Fa4Variant(split="k", scheduler="persistent"), heads(128, mask="causal"), "b200", (300, 700)),
    "pair": (Fa4Variant(cta_group=2, emulated_share=0.1875, scheduler="persistent"), heads(128), "b200", (700, 500)),
    "maximum on load": (Fa4Variant(load_max=True, scheduler="persistent"), heads(128, mask="causal"), "b300", (300, 500)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_computes_attention(case: str) -> None:
    variant, workload, machine, seqlens = CASES[case]
    out, lse, expected, expected_lse = run(
        source_of(variant, workload, machine), workload, seqlens, seed=len(case), machine=machine
    )
    np.testing.assert_allclose(out, expected, atol=4e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-4)


def test_computes_attention_in_another_matrix_order() -> None:
    variant, workload = Fa4Variant(scheduler="persistent"), heads(64)
    pipeline = build_pipeline(workload, variant, load_machine("b200"))
    source = source_of(
        variant, workload, pipeline=with_matrix_program(pipeline, ("pv1a", "pv1b", "pv0a", "pv0b", "qk1", "qk0"))
    )
    out, _, expected, _ = run(source, workload, (300, 500))
    np.testing.assert_allclose(out, expected, atol=4e-3)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    variant, workload = Fa4Variant(emulated_share=0.25), heads(128)
    out, _, expected, _ = run(source_of(variant, workload), workload, (300, 333), poison=True)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 0, 7]).all() and np.isnan(out[0, 1, 9]).all() and np.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize(
    "line",
    [
        "mbarrier.wait(softmax.p_rest, phase)",
        "mbarrier.wait(softmax.p_ready, phase)",
        "mbarrier.wait(softmax.s_full, s_phase)",
        "mbarrier.wait(ring.empty.index(slot), phase ^ 1)",
        "tcgen05_commit(kv.empty.index(v_slot))",
    ],
)
def test_a_missing_barrier_is_an_error(line: str) -> None:
    variant, workload = Fa4Variant(scheduler="persistent", kv_stages=2), heads(64)
    source = source_of(variant, workload)
    assert line in source
    with pytest.raises(EmulationError, match=r"line \d+: "):
        run(source.replace(line, "pass"), workload, (300, 700))


@pytest.mark.parametrize(("degree", "bound"), [(3, 9e-5), (4, 4e-6), (5, 4e-7)])
def test_exp2_on_the_fma_pipe(degree: int, bound: float) -> None:
    source = source_of(Fa4Variant(emulated_share=0.1875, poly_degree=degree), heads(128))
    session = new_session(Source("generated", source), load_machine("b200"))
    text = load(session).exp2_ptx(tuple(range(0, 32, 2)))
    x = np.linspace(-126, 8, 32 * 4001, dtype=np.float32).reshape(-1, 32)
    got = np.stack([r.view(np.float32) for r in ptx.run(text, list(x.T), 32)], axis=1)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(got / exact - 1).max() < bound
    low = ptx.run(text, [np.full(4, value, np.float32) for value in [-np.inf, -1e30, -127.5, -200.0] * 8], 32)
    assert all((r == 0).all() for r in low)


# --- what they compile to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_is_readable_python(case: str) -> None:
    variant, workload, machine, _ = CASES[case]
    tree = ast.parse(source_of(variant, workload, machine))
    assert ast.get_docstring(tree)
    header = next(node for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(header.value)["workload"]["head_dim_qk"] == workload.head_dim_qk
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nested = {
        node
        for outer in functions
        for node in ast.walk(outer)
        if node is not outer and isinstance(outer, ast.FunctionDef)
    }
    functions = [node for node in functions if node not in nested]
    assert all(ast.get_docstring(function) for function in functions)
    assert tree.body[-1].name == "launch"
    roles = [node for node in functions if node.name.endswith("_role")]
    assert {node.name for node in roles} == {"load_role", "mma_role", "softmax_role", "correction_role"}
    assert all(len(node.args.args) <= 5 for node in roles)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"struct", "torch", "triton"}


def newest_triton() -> bool:
    found = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.rubin") if HAS_TRITON else None
    return found is not None


HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


@NEEDS_TRITON
@pytest.mark.parametrize(("case", "target"), [pytest.param("pair", "sm_100a", marks=whole), ("causal", "sm_103a")])
def test_compiles_to_what_the_variant_says(case: str, target: str, tmp_path: Path) -> None:
    from tilecast.codegen.compiler.flow import steady_loops
    from tilecast.codegen.compiler.sass import compile_and_read

    variant, workload, machine, _ = CASES[case]
    if not newest_triton() and (variant.cta_group == 2 or target == "sm_103a"):
        pytest.skip("needs Triton 3.9")
    path = tmp_path / "kernel.py"
    path.write_text(source_of(variant, workload, machine))
    code = compile_and_read(path, target)
    compiled, instructions = code.compiled, code.instructions()
    count = {
        name: sum(i.opcode == name for i in instructions) for name in ("UTCHMMA", "FFMA2", "FMUL2", "F2FP", "FMNMX3")
    }
    elements = variant.tile_n
    emulated = round(elements * variant.emulated_share)
    exponentials = sum(i.opcode == "MUFU" and i.modifiers.startswith(".EX2") for i in instructions)
    assert exponentials == 2 * (elements - emulated + 1)  # and one for the factor of the row
    assert count["FFMA2"] == 2 * (elements // 2 + emulated // 2 * variant.poly_degree + 1)
    assert count["FMNMX3"] == elements
    assert count["F2FP"] == 2 * (elements + workload.head_dim_v) // 2
    assert count["UTCHMMA"] == 64
    assert compiled.tmem_columns <= 512 and compiled.shared_bytes <= load_machine(machine)["smem.per_cta_bytes"]
    assert code.resources.stack_bytes == 0
    # One a group; a path that waits may go round the same loop another way.
    softmax = {loop.begin: loop for loop in steady_loops(instructions) if loop.pipes()["mufu"] >= 8}
    shortest = min(len(loop.instructions) for loop in softmax.values())
    assert sum(len(loop.instructions) < 1.1 * shortest for loop in softmax.values()) == variant.softmax_tiles
