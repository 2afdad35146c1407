"""What a compiler made of whole kernels: roles, rings and products of ours as their templates have them, and of kernels that are not ours."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.codegen.compiler.binary import BinaryError, from_cubin, read_binary
from tilecast.codegen.compiler.compile import CompileError, compile_kernel, compile_kernels
from tilecast.codegen.compiler.opcodes import OPCODES
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.report import as_dict, as_text
from tilecast.codegen.compiler.structure.shape import KernelShape, Loop, Role
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import cta_cost
from tilecast.model.compiled.roles.run import run_roles, tile_cycles
from tilecast.model.machine.changes import change_machine
from tilecast.model.machine.machine import load_machine

pytest.importorskip("torch")
pytest.importorskip("triton")


def shape_of(name: str, target: str) -> KernelShape:
    try:
        made = compile_kernel(ROOT / "kernels" / "generated" / f"{name}.py", target)
    except CompileError as error:
        if "needs Triton" in str(error):
            pytest.skip(str(error))
        raise
    return kernel_shape(from_cubin(made.cubin, f"{name}.cubin", target, made.name))


@pytest.fixture(scope="module")
def hopper() -> KernelShape:
    return shape_of("hopper_ws_d64_full", "sm_90a")


@pytest.fixture(scope="module")
def pair() -> KernelShape:
    return shape_of("blackwell_ws_d64_full_pair", "sm_100a")


def products(loop: Loop) -> Counter[tuple[tuple[int, int, int], str, bool]]:
    return Counter((step.shape, step.source, step.pair) for step in loop.steps if step.kind == "matrix")


def stages(loop: Loop, *kinds: str) -> list[int]:
    """Slots of the barriers of steps of ``kinds``, in the order of the code."""
    return [barrier.stages for step in loop.steps if step.kind in kinds for _, barrier in step.barriers]


def main_loop(role: Role) -> Loop:
    """The steady loop with most to do, of those that are met once a tile."""
    return next(loop for loop in role.walk() if loop.steady)


def test_a_hopper_kernel_has_three_consumers_and_a_producer(hopper: KernelShape) -> None:
    assert [(role.warps, role.work) for role in hopper.roles] == [
        ((0, 1, 2, 3), "matrix and compute"), ((4, 5, 6, 7), "matrix and compute"), ((8, 9, 10, 11), "matrix and compute"),
        ((12, 13, 15), "idle"), ((14,), "copy in"),
    ]  # fmt: skip
    assert [role.registers for role in hopper.roles[:3]] == [160] * 3 and (hopper.roles[4].registers or 99) < 40
    found, sites = hopper.resolved()
    assert found == sites > 60
    for role in hopper.roles[:3]:
        loop = main_loop(role)
        # S = Q K^T from shared memory, O = P V with P in registers: 64 keys, head_dim 64.
        assert products(loop) == {((64, 64, 16), "shared", False): 4, ((64, 64, 16), "registers", False): 4}
        # K and V wait in rings of four, and are given back to rings of four.
        assert stages(loop, "wait") == [4, 4] and stages(loop, "arrive") == [4, 4]
    producer = main_loop(hopper.roles[4])
    assert stages(producer, "wait", "expect", "copy_in") == [4] * 6
    assert {step.amount for step in producer.steps if step.kind == "expect"} == {64 * 64 * 2}


def test_consumers_wait_for_what_the_producer_fills(hopper: KernelShape) -> None:
    """The same address by any role that computes it: full barriers of the consumers are those that copies complete on."""

    def places(role: Role, *kinds: str) -> set[tuple[int, ...]]:
        return {
            b.places for step in main_loop(role).steps if step.kind in kinds for _, b in step.barriers if not b.named
        }

    filled, emptied = places(hopper.roles[4], "copy_in"), places(hopper.roles[4], "wait")
    for role in hopper.roles[:3]:
        assert places(role, "wait") == filled and places(role, "arrive") == emptied
    known = {barrier.places[0]: count for barrier, count in hopper.barriers}
    # A copy arrives once at a full barrier, every consumer at an empty one.
    assert {known[place] for ring in filled for place in ring} == {1}
    assert {known[place] for ring in emptied for place in ring} == {3}


def test_a_pair_of_ctas_on_blackwell(pair: KernelShape) -> None:
    assert [(role.warps, role.work) for role in pair.roles] == [
        ((0, 1, 2, 3), "compute"), ((4, 5, 6, 7), "compute"), ((8, 9, 10, 11), "compute"), ((12, 13), "idle"),
        ((14,), "matrix"), ((15,), "copy in"),
    ]  # fmt: skip
    found, sites = pair.resolved()
    assert found == sites > 100
    multiply, load = main_loop(pair.roles[4]), main_loop(pair.roles[5])
    assert products(multiply) == {((256, 128, 16), "shared", True): 8, ((256, 64, 16), "tensor", True): 16}
    commits = [step for step in multiply.steps if step.kind == "commit"]
    assert all(step.pair and step.multicast for step in commits) and stages(multiply, "commit") == [1, 12, 1, 12]
    copies = [step for step in load.steps if step.kind == "copy_in"]
    assert all(step.pair for step in copies) and stages(load, "copy_in") == [12, 12]
    # Both CTAs' copies complete on the leader's barriers, where its matrix warp waits.
    assert {barrier.owner for step in copies for _, barrier in step.barriers} == {"leader"}
    softmax = main_loop(pair.roles[1])
    assert {step.note for step in softmax.steps if step.kind == "wait"} == {"away"}
    assert any(step.kind == "arrive" and step.barriers[0][1].owner == "leader" for step in softmax.steps)
    assert sum(step.amount for step in softmax.steps if step.kind == "tensor_load") == 256


def test_a_portable_kernel_is_one_role() -> None:
    found = shape_of("triton_d64_full", "sm_80")
    (role,) = found.roles
    assert (role.warps, found.barriers) == ((0, 1, 2, 3), ())
    first, second = role.loops
    for loop in (first, second):
        assert products(loop) == {((16, 8, 16), "registers", False): 64}
    kinds = Counter(step.kind for step in first.steps)
    assert (kinds["copy_in"], kinds["group"] >= 1, kinds["group_wait"] >= 1) == (8, True, True)
    report = as_dict(found)
    assert [loop["name"] for loop in report["roles"][0]["loops"]] == ["0", "1"]
    assert "64 HMMA 16x8x16, A in registers" in as_text(found)


NOT_OURS = [
    ("layer_norm", "sm_80"), ("layer_norm", "sm_103a"), ("matmul", "sm_80"), ("matmul", "sm_90a"), ("matmul", "sm_100a"),
    ("attention", "sm_103a"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target"), NOT_OURS)
def test_kernels_that_are_not_ours(name: str, target: str, tmp_path: Path) -> None:
    from support.triton_kernels import cubin

    (tmp_path / "k.cubin").write_bytes(cubin(name, target))
    try:
        binary = read_binary(tmp_path)
    except BinaryError as error:
        if target != "sm_103a" or "use a newer triton" not in str(error):
            raise
        pytest.skip(str(error))
    assert {i.opcode for i in binary.instructions} <= OPCODES.keys()
    found = kernel_shape(binary)
    (role,) = found.roles
    resolved, sites = found.resolved()
    assert (role.warps, resolved) == ((0, 1, 2, 3), sites)
    loop = role.loops[0]
    multiplied = [step for step in loop.steps if step.kind == "matrix"]
    if name == "layer_norm":
        assert len(role.loops) == 2 and not multiplied and loop.pipes()["fma"] >= 16
        return
    # 128 rows, 64 columns and 64 deep, twice in attention: mma.sync is one warp's of four, the others are for all rows.
    warps = 4 if target == "sm_80" else 1
    assert sum(m * n * k for m, n, k in (step.shape for step in multiplied)) * warps == 128 * 64 * 64 * (
        2 if name == "attention" else 1
    )
    sources = {"sm_80": {"registers"}, "sm_90a": {"shared"}, "sm_100a": {"shared"}, "sm_103a": {"shared", "tensor"}}
    assert {step.source for step in multiplied} == sources[target]


def test_steady_loops_of_a_pair_and_who_arrives_where(pair: KernelShape) -> None:
    found = kernel_roles(pair)
    # Of roles of four warps the one on the matrix role's sub-partition; the correction's, two softmax groups'.
    assert [role.name for role in found.roles] == [
        "warp 2 (compute)", "warp 6 (compute)", "warp 10 (compute)", "warp 14 (matrix)", "warp 15 (copy in)",
    ]  # fmt: skip
    assert found.matrix == 3
    # Two tiles of 128x128 an SM: 2 x (Q K^T + P V) at head_dim 64.
    assert found.flop == 2 * 2 * 2 * 128 * 128 * 64
    softmax = found.roles[1].loop
    assert sum(one.amount for one in softmax if one.kind == "tensor_load") == 128
    # The mask that hides what lies beyond the keys stands under a branch that whole blocks take around it.
    assert len(softmax) < 600 < len(main_loop(pair.roles[1]).steps)
    by_name = {barrier.name: barrier for barrier in found.barriers}
    ring = next(
        barrier
        for barrier in by_name.values()
        if barrier.stages == 12 and any(kind == "copy" for _, kind, _ in barrier.parties)
    )
    assert ring.parties == ((4, "copy", 1),)
    scores = next(one.barrier for one in softmax if one.kind == "wait")
    assert found.barriers[scores].parties == ((3, "commit", 1),)
    ready = [one.barrier for one in softmax if one.kind == "arrive" and one.pair]
    assert ready and all((1, "arrive", 1) in found.barriers[one].parties for one in ready)
    # A slot of K and V is free at first, a full one is not.
    free = [one for one in found.roles[4].loop if one.kind == "wait"]
    full = [one for one in found.roles[3].loop if one.kind == "wait" and one.barrier == found.barriers.index(ring)]
    assert {one.amount for one in free} == {1} and {one.amount for one in full} == {0}


def test_a_steady_loop_is_no_faster_than_its_busiest_unit(pair: KernelShape) -> None:
    machine = load_machine("b200")
    found = kernel_roles(pair)
    run = run_roles(found, role_costs(machine))
    # 8 x 64 cycles of Q K^T, 16 x 32 of P V (tcgen05 m256n128 and m256n64), on 128 rows of two groups.
    assert run.busy["tensor"] == 8 * 64 + 16 * 32
    mufu = sum(one.pipe == "mufu" for role in found.roles[:3] for one in role.loop)
    assert run.busy["mufu"] == pytest.approx(8.0 * mufu, rel=0.02)
    assert run.cycles >= max(run.busy.values())
    slower = role_costs(change_machine(machine, {"sync.mbarrier_roundtrip_cycles": 400.0}, {})[0])
    assert run_roles(found, slower).cycles > run.cycles


def test_the_steady_loop_of_a_hopper_kernel(hopper: KernelShape) -> None:
    found = kernel_roles(hopper)
    consumers = [role for role in found.roles if any(one.kind == "wgmma" for one in role.loop)]
    # Three warpgroups of 64 rows: S = Q K^T and O += P V with 64 keys at head_dim 64.
    assert len(consumers) == 3 and found.flop == 3 * 2 * 2 * 64 * 64 * 64
    assert {one.shape for role in consumers for one in role.loop if one.kind == "wgmma"} == {(64, 64, 16)}
    assert {one.source for one in consumers[0].loop if one.kind == "wgmma"} == {"smem", "register"}
    free = {one.amount for one in found.roles[-1].loop if one.kind == "wait"}
    assert free == {1}, "a slot of K and V is free at first, also where the first wait's parity is not known"
    costs = role_costs(load_machine("h200-sxm"))
    run = run_roles(found, costs)
    # Eight products of 32 cycles a warpgroup; over 16 iterations, at whose two ends the warpgroups need not stand alike.
    assert run.busy["tensor"] == pytest.approx(3 * 8 * 32, abs=3 * 32 / 16)
    assert run.busy["tensor"] < run.cycles < 2 * run.busy["tensor"]
    # Exponentials of 64 x 64 scores on four sub-partitions of a quarter of 16 a cycle each.
    assert run.busy["mufu"] == pytest.approx(3 * 64 * 64 / 16, rel=0.02)


def test_a_tile_of_a_hopper_kernel_is_its_iterations_and_its_ends(hopper: KernelShape) -> None:
    found, costs = kernel_roles(hopper), role_costs(load_machine("h200-sxm"))
    cost = cta_cost(found, costs)
    assert cost.peeled == 1, "Q K^T of the first block stands before the loop, P V of the last behind it"
    assert 1000 < cost.ends < 6 * cost.steady.cycles
    assert tile_cycles(found, costs, 40) - tile_cycles(found, costs, 20) == pytest.approx(
        20 * cost.steady.cycles, rel=0.03
    )


MATMUL = """
import triton, triton.language as tl
@triton.jit
def matmul(a, b, c, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, n, K):
        x = tl.load(a + rows[:, None] * n + (k + ks)[None, :])
        y = tl.load(b + (k + ks)[:, None] * n + columns[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)
"""


def test_a_kernel_of_triton_that_is_not_ours(tmp_path: Path) -> None:
    """Its one role copies by lanes, in groups, and multiplies: copies bind it where they come slowly."""
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file = tmp_path / "matmul.py"
    file.write_text(MATMUL)
    spec = importlib.util.spec_from_file_location("matmul_not_ours", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {
        "a": "*fp16",
        "b": "*fp16",
        "c": "*fp32",
        "n": "i32",
        "M": "constexpr",
        "N": "constexpr",
        "K": "constexpr",
    }
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(module.matmul, signature, {"M": 128, "N": 128, "K": 64}, divisible)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    found = kernel_roles(kernel_shape(from_cubin(made.asm["cubin"], "matmul.cubin", "sm_90a", "matmul"), 4))
    assert len(found.roles) == 1 and found.flop == 2 * 128 * 128 * 64
    copied = sum(128 * one.amount for one in found.roles[0].loop if one.kind == "group_copy")
    assert copied == 2 * 2 * 128 * 64, "bytes of both operands' tiles"
    costs = role_costs(load_machine("h200-sxm"))
    run = run_roles(found, costs)
    assert run.busy["tensor"] == pytest.approx(8 * 64.0)
    slow = replace(costs, lane_bytes=16.0)
    assert run_roles(found, slow).cycles == pytest.approx(copied / 16.0, rel=0.02)
    # Two CTAs share the tensor core: what one leaves idle the other uses, and no more.
    both = run_roles(found, costs, 2)
    assert both.busy["tensor"] == pytest.approx(2 * run.busy["tensor"], rel=0.1)
    assert both.busy["tensor"] <= both.cycles <= 2.01 * run.cycles


def test_a_kernel_without_products_in_a_loop_is_followed_by_what_it_moves(tmp_path: Path) -> None:
    """Of its two loops the one that moves most; a loop that only counts is nothing to follow."""
    listing = tmp_path / "loop.sass"

    def write(*body: str) -> None:
        rows = [f"        /*{16 * at:04x}*/                   {text} ;" for at, text in enumerate(body)]
        head = '\t.section\t.text.loop,"ax",@progbits\n\t.headerflags\t@"EF_CUDA_SM90"\n'
        listing.write_text(head + "\n".join(rows) + "\n")

    write(
        "FADD R1, R1, R2", "@P0 BRA 0x0", "LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.U16 R8, desc[UR4][R2.64]",
        "STG.E.64 desc[UR4][R2.64], R4", "@P0 BRA 0x20", "EXIT",
    )  # fmt: skip
    found = kernel_roles(kernel_shape(read_binary(str(listing)), 4))
    assert found.flop == 0 and [len(role.loop) for role in found.roles] == [4]
    assert found.lane_bytes == 4 * 32 * (16 + 2 + 8)
    write("IADD3 R1, R1, 0x1, RZ", "@P0 BRA 0x0", "EXIT")
    with pytest.raises(ShapeError, match="expected a loop that multiplies, computes or moves data"):
        kernel_roles(kernel_shape(read_binary(str(listing)), 4))


def test_the_roles_of_a_backward_pass_with_its_warps_that_add() -> None:
    """Two warpgroups of five products and what subtracts LSE, a warp that copies in, two that add tiles of dQ by turns: every second iteration each."""
    try:
        compiled = compile_kernels(ROOT / "kernels" / "generated" / "hopper_bwd_d128_full.py", "sm_90a", "bf16")
    except CompileError as error:
        pytest.skip(str(error))
    made = next(one for one in compiled if one.name == "gradients")
    shape = kernel_shape(from_cubin(made.cubin, "backward.cubin", "sm_90a", made.name), made.warps)
    tile = 64 * 128 * 4
    found = kernel_roles(shape, tile)
    assert found.unrolled == 2 and found.flop == 5 * 2 * 64 * 128 * 128 + 2 * 64 * 128 * 16
    adders = [role for role in found.roles if any(one.kind == "copy_out" for one in role.loop)]
    assert len(adders) == 2
    for role in adders:
        assert sum(one.amount for one in role.loop if one.kind == "copy_out") == tile, "one tile in two iterations"
        assert any(one.source == "add" for one in role.loop), "all but a block's first program add"
        assert any(one.latency == "l2" for one in role.loop), "the counter of turns is looked at in L2"
    # Each adder gives back a slot of its own; the first also does before its loop, when the first dS is there.
    places = [{one.barrier for one in role.loop if one.kind == "arrive"} for role in adders]
    assert len(places[0]) == len(places[1]) == 1 and places[0] != places[1]
    assert sorted(sum(one.kind == "arrive" for one in role.ahead) for role in adders) == [0, 1]
    assert all(barrier.stages == 1 for barrier in found.barriers if not barrier.named)
    consumer = found.roles[found.matrix]
    # dQ as registers hold it: 16 bytes of a thread, no bank twice.
    stores = {(one.amount, one.shape) for one in consumer.loop if one.kind == "shared_store" and one.amount == 4}
    assert stores == {(4, (4, 4, 0))}
    # D: eight rows of lanes read the same numbers, 8 bytes a lane, which take two wavefronts all the same.
    assert {one.shape[0] for one in consumer.loop if one.kind == "shared_load"} == {2}
    costs = role_costs(load_machine("h200-sxm"))
    run = run_roles(found, costs)
    assert run.busy["port"] > run.busy["tensor"] > 2500
    assert 1000 < cta_cost(found, costs).ends < 4 * run.cycles
