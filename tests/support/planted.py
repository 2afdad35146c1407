"""Changes to shipped kernels, one substitution each: bugs that the default battery has to find, and changes that are none.

Written from the kernels' text, before the battery was run on any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.emulator.run import kernel_path

HF, HC, HW, HL = "hopper_ws_d128_full", "hopper_ws_d128_causal", "hopper_ws_d128_window", "hopper_ws_d64_causal_long"
H96 = "hopper_ws_d96_full"
BF, BC, BW = "blackwell_ws_d128_full", "blackwell_ws_d128_causal", "blackwell_ws_d128_window"
BP, B64 = "blackwell_ws_d128_full_pair", "blackwell_ws_d64_causal"


@dataclass(frozen=True, slots=True)
class Planted:
    """``old`` becomes ``new`` where it occurs for the ``nth`` time; ``kind``: synchronisation, mask, index, numbers, host, none."""

    name: str
    kernel: str
    kind: str
    old: str
    new: str
    nth: int = 0
    #: Barriers or buffers that a message may name in place of quoting a changed line.
    names: tuple[str, ...] = ()

    def shipped(self) -> str:
        """The file as it ships."""
        return kernel_path(self.kernel).read_text(encoding="utf-8")

    def text(self) -> tuple[str, set[int]]:
        """The changed file, and its changed lines (of a removed line: the lines around it)."""
        text, at = self.shipped(), -1
        for _ in range(self.nth + 1):
            at = text.find(self.old, at + 1)
        if at < 0:
            raise ValueError(f"{self.name}: {self.kernel} has no {self.old!r}")
        first = text.count("\n", 0, at) + 1
        changed = text[:at] + self.new + text[at + len(self.old) :]
        before, after = text.splitlines(), changed.splitlines()
        last = first + self.new.rstrip("\n").count("\n")
        if len(after) < len(before):
            return changed, {first - 1, *range(first, last + 1)}
        return changed, set(range(first, last + 1))


def planted(name: str, kernel: str, kind: str, old: str, new: str, nth: int = 0, names: str = "") -> Planted:
    return Planted(name, kernel, kind, old, new, nth, tuple(names.split()))


_p = planted
S, M, A, N, H, X = "synchronisation", "mask", "index", "numbers", "host", "none"

PLANTED = (
    # -- synchronisation, Hopper
    _p("wait for V in the last block dropped", HF, S, "            wait(v, n)\n            o = issue_pv(p.to(dtype), tile_at(v, n), o)", "            o = issue_pv(p.to(dtype), tile_at(v, n), o)", 0, "v"),
    _p("wait for Q dropped", HC, S, "            wait(q, q_number)\n", "", 0, "q"),
    _p("first K not waited for", HC, S, "            wait(k, n)\n            s = warpgroup_mma_wait", "            s = warpgroup_mma_wait", 0, "k"),
    _p("last V released before its product", HF, S, "            o = warpgroup_mma_wait(0, deps=[o])\n            release(v, n)\n", "            release(v, n)\n            o = warpgroup_mma_wait(0, deps=[o])\n", 0, "v"),
    _p("Q released too early in the last block but one", HC, S, "    if n + 1 == tile.last:", "    if n + 2 == tile.last:", 0, "q"),
    _p("Q never released with one block", HC, S, "            if end - 1 == first:\n                release(q, q_number)\n", "", 0, "q"),
    _p("K released twice", HF, S, "            release(k, n)\n            if end", "            release(k, n)\n            release(k, n)\n            if end", 0, "k"),
    _p("V released one block on", HF, S, "    release(tile.v, n)\n", "    release(tile.v, n + 1)\n", 0, "v"),
    _p("empty K with one arrival", HC, S, "k = make_ring(k_desc, KV_STAGES, WARPGROUPS)", "k = make_ring(k_desc, KV_STAGES, 1)", 0, "k"),
    _p("producer waits with the other parity", HF, S, "n // slots & 1 ^ 1)", "n // slots & 1)", 0, "empty"),
    _p("consumer phase never flips", HF, S, "mbarrier.wait(ring.full.index(n % slots), n // slots & 1)", "mbarrier.wait(ring.full.index(n % slots), 0)", 0, "full"),
    _p("passed blocks of the other warpgroup forgotten", HC, S, "            n = pass_blocks(n, cta_end - end, k, v)\n", "", 0, "k v"),
    _p("expects half of the bytes", HL, S, "mbarrier.expect(full, desc.block_type.nbytes)", "mbarrier.expect(full, desc.block_type.nbytes // 2)", 0, "full"),
    _p("all warps asked where one has decided", HF, S, "    vote(sums, LOST)\n    if some_above():\n", "    if gl.max(largest, 0) > LOST:\n"),
    _p("O used before its last product", HL, S, "            o = warpgroup_mma_wait(0, deps=[o])\n            release(v, n)\n", "            release(v, n)\n", 0, "v"),
    # -- synchronisation, Blackwell
    _p("S complete is not waited for", BF, S, "            mbarrier.wait(softmax.s_full, s_phase)\n", "", 0, "s"),
    _p("O complete is not waited for", BF, S, "        mbarrier.wait(softmax1.o_full, o_phase)\n", "", 0, "o"),
    _p("phase of O never flips", BF, S, "        o_phase = o_phase ^ 1\n", "", 0, "o"),
    _p("phase of P lost at the end of a tile", BF, S, "        tcgen05_commit(kv.empty.index(v_slot))\n        p_phase = p_phase ^ 1\n", "        tcgen05_commit(kv.empty.index(v_slot))\n", 0, "p"),
    _p("last quarter of P not waited for", BC, S, "    mbarrier.wait(softmax.p_rest, phase)\n", "", 0, "p_rest s o"),
    _p("P ready before its third quarter", BC, S, "        p.slice(64, QUARTER).store(c.to(dtype))\n        mbarrier.arrive(softmax.p_ready)\n", "        mbarrier.arrive(softmax.p_ready)\n        p.slice(64, QUARTER).store(c.to(dtype))\n", 0, "s"),
    _p("commit of S before its product", BC, S, "    tcgen05_mma(q, k.permute((1, 0)), softmax.s, use_acc=False)\n    tcgen05_commit(softmax.s_full)\n", "    tcgen05_commit(softmax.s_full)\n    tcgen05_mma(q, k.permute((1, 0)), softmax.s, use_acc=False)\n", 0, "s"),
    _p("V slot committed before the second group's product", BC, S, "        issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)\n        tcgen05_commit(kv.empty.index(v_slot))\n", "        tcgen05_commit(kv.empty.index(v_slot))\n        issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)\n", 0, "kv tiles"),
    _p("Q freed before the last products", BF, S, "        # Every QK of this work tile has been issued: when they are done, Q may be overwritten.\n        tcgen05_commit(q.empty.index(q0))\n", "        tcgen05_commit(q.empty.index(q0))\n        tcgen05_commit(q.empty.index(q0))\n", 0, "q"),
    _p("correction does not wait for the row factors", BF, S, "    mbarrier.wait(softmax.rows_full.index(0), n & 1)\n", "", 0, "rows rows_full rows_empty"),
    _p("row factors overwritten before they are read", BF, S, "            # The rest is off the path from S to P.\n            mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)\n", "", 0, "rows rows_full rows_empty"),
    _p("row maximum stored without waiting", BW, S, "    n += 1\n    mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)\n    softmax.rows.index(0).store(row_max)", "    n += 1\n    softmax.rows.index(0).store(row_max)", 0, "rows rows_full rows_empty"),
    _p("the other group is released", BF, S, "        correct(softmax1, n, step != 0, softmax0)", "        correct(softmax1, n, step != 0, softmax1)", 0, "rows rows_full rows_empty"),
    _p("P ready needs one arrival", BF, S, "p_ready = barriers(1, 2)", "p_ready = barriers(1, 1)", 0, "p_ready"),
    _p("both groups share S", BF, S, "        issue_qk(softmax1, tile_at(q, q1), tile_at(kv, k_slot))\n        tcgen05_commit(kv.empty.index(k_slot))\n        for", "        issue_qk(softmax0, tile_at(q, q1), tile_at(kv, k_slot))\n        tcgen05_commit(kv.empty.index(k_slot))\n        for", 0, "s s_full"),
    _p("the ring starts over without flipping", BF, S, "    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)", "    return gl.where(last, 0, slot + 1), phase", 0, "full empty kv q"),
    _p("pair: P ready in each CTA for itself", BP, S, "p_ready = barriers(1, 2, True)", "p_ready = barriers(1, 2, False)", 0, "p_ready"),
    _p("pair: bytes of both CTAs expected in one", BP, S, "mbarrier.expect(full, desc.nbytes_per_cta)", "mbarrier.expect(full, desc.block_type.nbytes)", 0, "full"),
    _p("pair: K freed too early", BP, S, "            issue_qk(softmax1, tile_at(q, q1), tile_at(k, k_slot))\n            tcgen05_commit(k.empty.index(k_slot))\n", "            tcgen05_commit(k.empty.index(k_slot))\n            issue_qk(softmax1, tile_at(q, q1), tile_at(k, k_slot))\n", 0, "k tiles"),
    _p("pair: O not waited for", BP, S, "        mbarrier.wait(softmax0.o_full, o_phase)\n", "", 0, "o"),
    # -- masks
    _p("whole blocks end a key late", HC, M, "gl.minimum(position, seqlen_k - 1)", "gl.minimum(position + 2, seqlen_k - 1)"),
    _p("whole blocks of a window begin a key early", HW, M, "first = gl.maximum(position + ROWS - 1 - problem.window_left, 0)", "first = gl.maximum(position + ROWS - 2 - problem.window_left, 0)"),
    _p("whole blocks of a window end a key late", HW, M, "gl.minimum(position + problem.window_right, seqlen_k - 1)", "gl.minimum(position + 2 + problem.window_right, seqlen_k - 1)"),
    _p("a block too few at the end of a window", HW, M, "gl.minimum(position + ROW_COUNT + problem.window_right, seqlen_k)", "gl.minimum(position + ROW_COUNT - 1 + problem.window_right, seqlen_k)"),
    _p("a causal tile ends a key early", HC, M, "gl.minimum(position + ROW_COUNT, seqlen_k)", "gl.minimum(position + ROW_COUNT - 1, seqlen_k)"),
    _p("no mask in the last partial block", HF, M, "            if end > own_copy(problem.seqlen_k) // TILE_N:", "            if end > (own_copy(problem.seqlen_k) + 1) // TILE_N:"),
    _p("a row without a key is none", HC, M, "    empty = keys_seen(problem, row) < 0\n", "    empty = keys_seen(problem, row) < -1\n"),
    _p("diagonal block not masked when it just fits", BC, M, "if key + TILE_N > diagonal + 1:", "if key + TILE_N > diagonal + 2:"),
    _p("left edge not masked in the last row", BW, M, "(key < diagonal + ROWS - 1 - problem.window_left)", "(key < diagonal + ROWS - 2 - problem.window_left)"),
    _p("right edge a key late", BW, M, "first_row_stop = gl.minimum(diagonal + problem.window_right + 1, problem.seqlen_k)", "first_row_stop = gl.minimum(diagonal + problem.window_right + 2, problem.seqlen_k)"),
    _p("first block of a window a block late", BW, M, "first = gl.maximum(diagonal - problem.window_left, 0) // TILE_N", "first = gl.maximum(diagonal - problem.window_left + 1, 0) // TILE_N"),
    _p("blocks rounded down", BF, M, "blocks = gl.cdiv(problem.seqlen_k, TILE_N)", "blocks = gl.maximum((problem.seqlen_k + TILE_N - 2) // TILE_N, 1)"),
    _p("bits of sixteen columns shifted", BC, M, "seen = (1 << gl.minimum(gl.maximum(stop[:, None] - chunk, 0), 16)) - 1", "seen = (1 << gl.minimum(gl.maximum(stop[:, None] - chunk, 0), 15)) - 1"),
    _p("a tile without keys takes none", B64, M, "blocks = gl.maximum(gl.cdiv(stop, TILE_N), 1)", "blocks = gl.cdiv(stop, TILE_N)"),
    # -- indices: heads, batch, tiles
    _p("K head by remainder", HC, A, "load(k, n, k_desc, batch, head // problem.group, key)", "load(k, n, k_desc, batch, head % problem.group, key)"),
    _p("V of the query head", HF, A, "load(v, n, v_desc, batch, head // problem.group, key)", "load(v, n, v_desc, batch, head, key)"),
    _p("Blackwell: K and V head by remainder", BF, A, "head_kv = head // problem.group", "head_kv = head % problem.group"),
    _p("batch of Q lost", HC, A, "load(q, tiles * WARPGROUPS + g, q_desc, batch, head, row + g * ROWS)", "load(q, tiles * WARPGROUPS + g, q_desc, 0, head, row + g * ROWS)"),
    _p("batch of the log-sum-exp lost", BF, A, "problem.lse + (batch * problem.heads_q + head)", "problem.lse + (head)"),
    _p("heads of a group not cut", BC, A, "heads_here = gl.minimum(problem.heads_at_once, problem.heads - first_head)", "heads_here = problem.heads_at_once"),
    _p("second warpgroup reads the first one's Q", HL, A, "load(q, turn * WARPGROUPS + g, q_desc, batch, head, row + g * ROWS)", "load(q, turn * WARPGROUPS + g, q_desc, batch, head, row)"),
    _p("second row block of a tile stored over the first", BF, A, "batch, head, row + ROWS)\n        o_phase", "batch, head, row)\n        o_phase"),
    _p("rows past the end stored", HF, A, "there = (rows < problem.seqlen_q)[:, None]", "there = (rows <= problem.seqlen_q)[:, None]"),
    _p("last query block forgotten for one row", HC, A, "query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value)", "query_blocks, heads = (seqlen_q + TILE_M.value - 2) // TILE_M.value"),
    # -- numbers
    _p("coefficient off by 1e-4", BF, N, "0x3e6906a43e6906a4", "0x3e6920dc3e6920dc"),
    _p("polynomial without its last term", BC, N, "mov.b64 p, c3;", "mov.b64 p, c2;"),
    _p("maximum that loses a NaN", BF, N, "max.NaN.ftz.f32", "max.ftz.f32"),
    _p("infinite scores do not make NaN", BC, N, "minus_base = ((base - base) - base * scale_log2)[:, None]", "minus_base = (0.0 - base * scale_log2)[:, None]"),
    _p("growth of the maximum compared the other way", BC, N, "gl.where((new_max - row_max) * scale_log2 <= MAX_GROWTH, row_max, new_max)", "gl.where((new_max - row_max) * scale_log2 > MAX_GROWTH, new_max, row_max)"),
    _p("row sums are not rescaled", BF, N, "row_sum = fma2(row_sum, rescale[:, None], row_total(a, b, c, d))", "row_sum = fma2(row_sum, rescale[:, None] * 0.0 + 1.0, row_total(a, b, c, d))"),
    _p("O stays where its reference moves", HF, N, "        o = scaled(o, factor)\n", "        o = scaled(o, factor * 0 + 1)\n"),
    _p("sums stay where their reference moves", HF, N, "scaled(sums, factor), scaled(before.row_sums, factor)", "scaled(sums, factor), before.row_sums"),
    _p("exponentials that overflowed are kept", HF, N, "LOST = gl.constexpr(2.0**120)", "LOST = gl.constexpr(float(\"inf\"))"),
    _p("references move when fp16 has overflowed", HC, N, "OUTGROWN = gl.constexpr(64.0)", "OUTGROWN = gl.constexpr(2.0**30)"),
    _p("a row without a score begins at 0", HC, N, "gl.where(row_max == float(\"-inf\"), -1e30,", "gl.where(row_max == float(\"-inf\"), 0.0,"),
    _p("sums of a quarter counted twice", BF, N, "total = packed(\"add\", packed(\"add\", a, b), packed(\"add\", c, d))", "total = packed(\"add\", packed(\"add\", a, b), packed(\"add\", c, c))"),
    _p("row maximum of seven eighths", BC, N, "new_max = row_maximum(a, b, c, d, row_max)", "new_max = row_maximum(a, b, c, c, row_max)"),
    _p("scale of the maximum forgotten", HF, N, "-1e30, row_max * problem.scale_log2)", "-1e30, row_max * 0.1275)"),
    # -- host
    _p("scale of the first launch kept", HF, H, "        attention[grid](*arguments, max(scale * LOG2E, 1e-37), **OPTIONS)", "        attention[grid](*arguments, OPTIONS.setdefault(\"num_stages\", max(scale * LOG2E, 1e-37)), **OPTIONS)"),
    _p("plan keeps the first shape's tensors", BF, H, "    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape\n", "    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape\n    k = DTYPES.setdefault(str(k.shape), k)\n"),
    _p("no tensor for a log-sum-exp that is None", HF, H, "    if lse is None:\n", "    if lse is NotImplemented:\n"),
    _p("no keys: out left as it was", BF, H, "        out.zero_()\n", ""),
    _p("any scale is taken", HF, H, "    if not 0.0 < scale <= 2.0e38:", "    if scale > 2.0e38:"),
    _p("a tiny scale makes hidden keys NaN", HC, H, "max(scale * LOG2E, 1e-37)", "scale * LOG2E * (scale > 1e-20)"),
    _p("lse of any shape", BF, H, "    if (tuple(lse.shape), str(lse.dtype), lse.device) != (rows, \"torch.float32\", q.device) or not", "    if (str(lse.dtype), lse.device) != (\"torch.float32\", q.device) or not"),
    _p("strides of the query heads", BF, H, "out, lse, *(n // 8 for n in out.stride()[:3]), *sizes)", "out, lse, *(n // 8 for n in out.stride()[1:3]), out.stride()[2] // 8, *sizes)"),
)  # fmt: skip

# Written after the last change to the battery's problems, and run once.
LATER = (
    # Listed as harmless first: with more rows than keys a warpgroup passes a block of the next tile before V of this one has landed,
    # and takes the phase before the last for it.
    _p("passed blocks are not waited for", HC, S, "        wait(v, n)\n        release(v, n)\n        n += 1\n    return n", "        release(v, n)\n        n += 1\n    return n", 0, "v"),
    _p("V waited for one block late", HC, S, "    wait(tile.v, n)\n    o = issue_pv(operand", "    wait(tile.v, n - 1)\n    o = issue_pv(operand", 0, "v"),
    _p("second warpgroup does not release V", HF, S, "    o = warpgroup_mma_wait(0, deps=[o])\n    release(tile.v, n)\n    if some", "    o = warpgroup_mma_wait(0, deps=[o])\n    if tile.q_number % 2 == 0:\n        release(tile.v, n)\n    if some", 0, "v"),
    _p("Q of the next tile not waited for in the second round", HF, S, "wait(q, q_number)", "wait(q, q_number * 0 + g)", 0, "q"),
    _p("K loaded without waiting for its slot", HW, S, "    mbarrier.wait(ring.empty.index(n % slots), n // slots & 1 ^ 1)\n", "", 0, "k v q empty full"),
    _p("first product of S not waited for", HL, S, "warpgroup_mma_wait(0, deps=[issue_qk(tile_at(q, q_number), tile_at(k, n))])", "warpgroup_mma_wait(1, deps=[issue_qk(tile_at(q, q_number), tile_at(k, n))])", 0, "k"),
    _p("O complete committed before the last quarter", BC, S, "    issue_pv(softmax1, tile_at(kv, v_slot), p_phase, blocks != 1)\n    tcgen05_commit(softmax1.o_full)\n", "    tcgen05_commit(softmax1.o_full)\n    issue_pv(softmax1, tile_at(kv, v_slot), p_phase, blocks != 1)\n", 0, "o o_full"),
    _p("sums published before they are stored", BF, S, "        softmax.rows.index(0).store(total)\n        mbarrier.arrive(softmax.rows_full.index(0))\n", "        mbarrier.arrive(softmax.rows_full.index(0))\n        softmax.rows.index(0).store(total)\n", 0, "rows rows_full rows_empty"),
    _p("correction says ready before it rescales", BF, S, "    factor = read(softmax, n, released)\n", "    factor = read(softmax, n, released)\n    mbarrier.arrive(softmax.p_ready)\n", 0, "p_ready o"),
    _p("P stored over S before S is read", BC, S, "        left, right = halves(softmax.s.load(row_per_thread(TILE_N)))\n", "        p.slice(0, QUARTER).store(gl.full([ROWS, QUARTER], 0.0, gl.float32, row_per_thread(QUARTER)).to(dtype))\n        left, right = halves(softmax.s.load(row_per_thread(TILE_N)))\n", 0, "s"),
    _p("pair: V waited for too late", BP, S, "            v_slot, v_at = take(v, v_at)\n            issue_pv(softmax0, tile_at(v, v_slot), p_phase, step != 0)\n", "            v_slot, v_at = v_at[0], after(v, v_at[0], v_at[1])\n            issue_pv(softmax0, tile_at(v, v_slot), p_phase, step != 0)\n", 0, "v"),
    _p("a key too many at the end of the sequence", HF, M, "keys < problem.seqlen_k", "keys <= problem.seqlen_k"),
    _p("a row sees the next key", HC, M, "    return gl.minimum(position, seqlen_k - 1)\n", "    return gl.minimum(position + 1, seqlen_k - 1)\n"),
    _p("window: left edge one key in", HW, M, "gl.maximum(position - problem.window_left, 0), gl.minimum", "gl.maximum(position - problem.window_left + 1, 0), gl.minimum"),
    _p("window: first block skipped", HW, M, "    return gl.minimum(first // TILE_N, gl.cdiv(end, TILE_N) - 1), gl.cdiv(end, TILE_N)", "    return gl.minimum((first + 1) // TILE_N, gl.cdiv(end, TILE_N) - 1), gl.cdiv(end, TILE_N)"),
    _p("offset forgotten in the block count", BC, M, "stop = gl.minimum(row + TILE_M, problem.seqlen_q) + problem.seqlen_k - problem.seqlen_q", "stop = gl.minimum(row + TILE_M, problem.seqlen_q)"),
    _p("window: last rows see too little", BW, M, "stop = gl.minimum(diagonal + gl.minimum(TILE_M, problem.seqlen_q - row) + problem.window_right, problem.seqlen_k)", "stop = gl.minimum(diagonal + gl.minimum(TILE_M, problem.seqlen_q - row) - 1 + problem.window_right, problem.seqlen_k)"),
    _p("heads and batch exchanged", HF, A, "return head // problem.heads_q, head % problem.heads_q, block * TILE_M, exists", "return head % problem.heads_q, head // problem.heads_q, block * TILE_M, exists"),
    _p("second half of the queries reads the first half's Q", BF, A, "q_at = load(q, q_at, q_desc, batch, head, row + ROWS)", "q_at = load(q, q_at, q_desc, batch, head, row)"),
    _p("a pair of blocks in the wrong turn", HC, A, "place = trip * programs + gl.where(trip % 2 == 0, pid, programs - 1 - pid)", "place = trip * programs + gl.where(trip % 2 == 0, pid, programs - pid)"),
    _p("the logarithm of another base", BC, N, "LN2 = gl.constexpr(0.6931471805599453)", "LN2 = gl.constexpr(0.6931)"),
    _p("a fresh maximum forgets the old one", HC, N, "row_max = gl.maximum(before.row_max, gl.max(s, 1))", "row_max = gl.max(s, 1)"),
    _p("first block's factor applied", BF, N, "correct(softmax0, n, step != 0, softmax1)", "correct(softmax0, n, step >= 0, softmax1)"),
    _p("half of the sums", HC, N, "row_sum = gl.convert_layout(gl.sum(statistics.row_sums, 1), SCORE_ROWS)", "row_sum = gl.convert_layout(gl.max(statistics.row_sums, 1), SCORE_ROWS)"),
    _p("window of the launch ignored", HW, H, "    window_left = no_limit if window_left < 0 else min(window_left, no_limit)\n", "    window_left = no_limit\n"),
    _p("negative keys heads accepted", HC, H, "q.shape[1] != q.shape[1] // max(k.shape[1], 1) * k.shape[1]", "q.shape[1] < k.shape[1]"),
    _p("scale in the wrong base", BF, H, "LOG2E = 1.4426950408889634", "LOG2E = 1.44"),
)  # fmt: skip

BENIGN = (
    _p("waits the other way round", HF, X, "            wait(q, q_number)\n            wait(k, n)\n", "            wait(k, n)\n            wait(q, q_number)\n"),
    _p("a product waited for earlier", HF, X, "    s = warpgroup_mma_wait(1, deps=[s])\n", "    s = warpgroup_mma_wait(0, deps=[s])\n"),
    _p("V waited for before S", HC, X, "    wait(tile.k, n + 1)\n    s = issue_qk", "    wait(tile.k, n + 1)\n    wait(tile.v, n)\n    s = issue_qk"),
    _p("a fence more", HC, X, "    fence_async_shared()\n    gl.warp_specialize", "    fence_async_shared()\n    fence_async_shared()\n    gl.warp_specialize"),
    _p("three stages to two", HC, X, "KV_STAGES = gl.constexpr(3)", "KV_STAGES = gl.constexpr(2)"),
    _p("one Q stage", HC, X, "Q_STAGES = gl.constexpr(2)", "Q_STAGES = gl.constexpr(1)"),
    _p("every block masked", HC, X, "seqlen_k - 1), 0) // TILE_N\n", "seqlen_k - 1), 0) // TILE_N * 0\n"),
    _p("a whole block masked all the same", HF, X, "if end > own_copy(problem.seqlen_k) // TILE_N:", "if end >= own_copy(problem.seqlen_k) // TILE_N:"),
    _p("more registers", HF, X, "[4, 1], [232, 40]", "[4, 1], [224, 56]"),
    _p("Q waited for after the first K", HL, X, "            wait(q, q_number)\n            wait(k, n)\n", "            wait(k, n)\n            wait(q, q_number)\n"),
    _p("masks where none is needed", BC, X, "if key + TILE_N > diagonal + 1:", "if key + TILE_N > diagonal - 7:"),
    _p("O rescaled always", BC, X, "if later & (gl.max((factor != 1.0).to(gl.int32), 0) != 0):", "if later:"),
    _p("maximum moves at once", BF, X, "MAX_GROWTH = gl.constexpr(8.0)", "MAX_GROWTH = gl.constexpr(0.0)"),
    _p("maximum moves late", BF, X, "MAX_GROWTH = gl.constexpr(8.0)", "MAX_GROWTH = gl.constexpr(4.0)"),
    _p("four slots of K and V", BF, X, "KV_STAGES = gl.constexpr(5)", "KV_STAGES = gl.constexpr(3)"),
    _p("rescale in other pieces", BW, X, "RESCALE_COLUMNS = gl.constexpr(16)", "RESCALE_COLUMNS = gl.constexpr(32)"),
    _p("other columns emulated", BF, X, "exp2_ptx((12, 14, 28, 30))", "exp2_ptx((4, 6, 20, 22))"),
    _p("no column emulated", BC, X, "exp2_ptx((12, 14, 28, 30))", "exp2_ptx(())"),
    _p("all three quarters of P in one wait", BF, X, "    mbarrier.wait(softmax.p_ready, phase)\n", "    mbarrier.wait(softmax.p_ready, phase)\n    mbarrier.wait(softmax.p_rest, phase)\n"),
    _p("larger L2", BC, X, "50 * 2**20", "60 * 2**20"),
    # Written as bugs; the battery was quiet, and right.
    # The release of V, which the producer waits for before it comes back to the slot, says the same.
    _p("K released before its product", HC, X, "    s = warpgroup_mma_wait(1, deps=[s])\n    release(tile.k, n + 1)\n", "    release(tile.k, n + 1)\n    s = warpgroup_mma_wait(1, deps=[s])\n", 0, "k"),
    # One role copies and multiplies, and waits for the product before the next copy.
)  # fmt: skip
