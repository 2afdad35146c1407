"""Changes to serving, GEMM and 8-bit kernels, and more to 16-bit ones, one substitution each: see `planted`.

Written from the kernels' text before the battery was run on any of them.
"""

from __future__ import annotations

from .planted import Planted, planted

SV, SW = "hopper_serve_d64", "hopper_serve_d192_128"
GH, GB, GC = "gemm_hopper_short", "gemm_blackwell", "gemm_blackwell_c32"
H8, H6, B8, BW = "hopper_fp8_d128_causal", "hopper_fp8_d64_full", "blackwell_fp8_d64_full", "blackwell_fp8_d128_window"
HF, HC, BF, BC = (
    "hopper_ws_d128_full",
    "hopper_ws_d192_128_causal",
    "blackwell_ws_d192_128_full",
    "blackwell_ws_d96_causal",
)
HB, HK = "hopper_bwd_d64_full", "hopper_bwd_d128_causal"
_p = planted
S, M, A, N, H, C, X = "synchronisation", "mask", "index", "numbers", "host", "compiled", "none"

FAMILIES = (
    # -- synchronisation, serving
    _p("K not waited for", SV, S, "    row_max, row_sums, o = state\n    wait(ring.k_full, n)\n", "    row_max, row_sums, o = state\n", 0, "k k_boxes k_full"),
    _p("V not waited for", SV, S, "    wait(ring.v_full, n)\n", "", 0, "v v_boxes v_full"),
    _p("block given back before P V", SV, S, "    o = (warpgroup_mma_wait(0, deps=made),)\n    arrive(ring.empty, n)\n", "    arrive(ring.empty, n)\n    o = (warpgroup_mma_wait(0, deps=made),)\n", 0, "v v_boxes empty"),
    _p("block given back twice", SV, S, "    arrive(ring.empty, n)\n    return new_max", "    arrive(ring.empty, n)\n    arrive(ring.empty, n)\n    return new_max", 0, "empty"),
    _p("blocks loaded without a free slot", SV, S, "    wait_empty(ring.empty, n)\n", "", 0, "k v k_boxes v_boxes empty k_full v_full"),
    _p("Q not waited for", SV, S, "    wait(items.q_full, turn)\n", "", 0, "q q_full"),
    _p("no fence after Q", SV, S, "    fence_async_shared()  # the load warp's copies are not the copy engine's\n", "", 0, "q"),
    _p("Q loaded without a free slot", SV, S, "    wait_empty(items.q_empty, turn)\n", "", 0, "q q_empty q_full"),
    _p("Q given back before the last block", SV, S, "        n += 1\n    arrive(items.q_empty, turn)\n", "        n += 1\n        if key + TILE_N >= item.end:\n            n = n\n    arrive(items.q_empty, turn + 1)\n", 0, "q q_empty"),
    _p("no fence after clearing V", SV, S, "        tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))\n    fence_async_shared()\n", "        tile.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))\n", 0, "v v_boxes"),
    _p("splits announced before they are stored", SV, S, "    meet()  # all threads have stored before one of them says so\n    arrive(items.left, turn)\n    return n", "    return n", 0, "left"),
    _p("arrival at a counter that releases nothing", SV, S, 'sem="release") == count - 1', 'sem="relaxed") == count - 1', 0, "partials arrived"),
    _p("the last one acquires nothing", SV, S, 'gl.atomic_xchg(scratch.arrived + counter, 0, sem="acquire")', 'gl.atomic_xchg(scratch.arrived + counter, 0, sem="relaxed")', 0, "partials arrived"),
    _p("left is asked for with another number", SV, S, "            arrive(items.left_empty, turn)\n            turn += 1", "            turn += 1\n            arrive(items.left_empty, turn)", 0, "left left_empty"),
    _p("half of the bytes of a block", SV, S, "    mbarrier.expect(full, PIECES * TILE_N * COLUMNS * 2)\n", "    mbarrier.expect(full, PIECES * TILE_N * COLUMNS)\n", 0, "full k_full v_full"),
    _p("Q's barrier counts one thread", SV, S, "items = Items(q, barriers(Q_SLOTS, 32)", "items = Items(q, barriers(Q_SLOTS, 1)", 0, "q_full"),
    # -- serving: lengths, masks, splits, addresses
    _p("the last block of values is not cleared", SV, M, "    if key + TILE_N > item.k_len:\n", "    if key + TILE_N > item.k_len + 1:\n"),
    _p("one row too few is cleared", SV, M, "clear_rows(ring.v, n, item.k_len - key)", "clear_rows(ring.v, n, item.k_len - key + 1)"),
    _p("whole blocks end a key late", SV, M, "whole_end = gl.minimum(item.low + diagonal + batch.right + 1, item.k_len)", "whole_end = gl.minimum(item.low + diagonal + batch.right + 2, item.k_len)"),
    _p("whole blocks begin a key early", SV, M, "whole_begin = item.high + diagonal - batch.left\n", "whole_begin = item.high + diagonal - batch.left - 1\n"),
    _p("a key beyond the sequence", SV, M, "last_key = gl.minimum(query + diagonal + batch.right, item.k_len - 1)", "last_key = gl.minimum(query + diagonal + batch.right, item.k_len)"),
    _p("the first keys of a window left out", SV, M, "    begin = gl.maximum(gl.maximum(low + diagonal - batch.left, 0) & -TILE_N, first_key + begin * TILE_N)", "    begin = gl.maximum(gl.maximum(low + diagonal - batch.left + TILE_N - 1, 0) & -TILE_N, first_key + begin * TILE_N)"),
    _p("splits end a block early", SV, M, "begin, end = split * each, gl.minimum((split + 1) * each, blocks)", "begin, end = split * each, gl.minimum((split + 1) * each, blocks - 1)"),
    _p("even shares overlap", SV, M, "begin, end = split * blocks >> batch.split_bits, (split + 1) * blocks >> batch.split_bits", "begin, end = split * blocks >> batch.split_bits, ((split + 1) * blocks >> batch.split_bits) + 1"),
    _p("rows of a tile rounded down", SV, A, "rows + TILE_M - 1 >> 6, 0)", "rows + TILE_M - 2 >> 6, 0)"),
    _p("head of a key by remainder", SV, A, "query, head = number // batch.group, item.head_kv * batch.group + number % batch.group", "query, head = number // batch.group, item.head_kv + number % batch.group * batch.heads_kv"),
    _p("pages of another sequence", SV, A, "        table = batch.table + item.b.to(gl.int64) * batch.stride_table\n        for key", "        table = batch.table + (item.b + (item.begin > 0).to(gl.int32)).to(gl.int64) * batch.stride_table\n        for key"),
    _p("token of a page by the block", SV, A, "token = key % PAGE if PAGE > TILE_N else 0", "token = 0"),
    _p("a page too far", SV, A, "pages = pages + (gl.load(table + at // PAGE, mask=at < k_len, other=FAR),)", "pages = pages + (gl.load(table + at // PAGE, mask=at <= k_len, other=FAR),)"),
    _p("slot of a split by the tile", SV, A, "    return tile * (scratch.split_bound + groups)\n", "    return tile * scratch.split_bound\n"),
    _p("groups of splits merge the wrong slots", SV, A, "state = merged(scratch, slot + scratch.split_bound, groups, row, count)", "state = merged(scratch, slot, groups, row, count)"),
    _p("members of the last group", SV, A, "members = gl.minimum(item.splits - group * MERGED, MERGED)", "members = MERGED"),
    _p("log-sum-exp of the batch row", SV, A, "            at = q_start * rows.stride_ls\n", "            at = b_long * rows.stride_ls\n"),
    _p("items beyond the first round", SV, A, "    return done + gl.associative_scan(tiles * splits * batch.heads_kv, 0, plus)\n", "    return gl.associative_scan(tiles * splits * batch.heads_kv, 0, plus)\n"),
    # -- serving: numbers
    _p("weight of a split from its sum", SV, N, "    row_sum = gl.sum(weight * split_sum, 0)\n", "    row_sum = gl.sum(split_sum, 0)\n"),
    _p("sink left out of the sums", SV, N, "        row_sum = row_sum * weight + mufu_exp2(sink - new_max)\n", "        row_sum = row_sum * weight\n"),
    _p("sink in the wrong base", SV, N, "other=0.0).to(gl.float32) * LOG2E", "other=0.0).to(gl.float32)"),
    _p("cap of half the size", SV, N, "s = cap_log2 - 2.0 * cap_log2 / (gl.exp2(s * scale_log2) + 1.0)", "s = cap_log2 - cap_log2 / (gl.exp2(s * scale_log2) + 1.0)"),
    _p("sums are not rescaled", SV, N, "    row_sums = row_sums * gl.convert_layout(correction, gl.SliceLayout(1, row_sums.type.layout))[:, None] + sums\n", "    row_sums = row_sums + sums\n"),
    _p("factor of the values forgotten", SV, N, "            made = made + (o[i] * v_scale,)\n", "            made = made + (o[i],)\n"),
    _p("factor of the keys of head 0", SV, N, "item.b * rows.stride_kb + item.head_kv * rows.stride_kg)", "item.b * rows.stride_kb)"),
    # -- serving: host
    _p("right limit ignored", SV, H, "    left, right = (FAR.value if limit < 0 else min(limit, FAR.value) for limit in window)\n", "    left, right = (FAR.value if limit < 0 else min(limit, FAR.value) for limit in (window[0], -1))\n"),
    _p("log-sum-exp of packed rows", SV, H, "(0, 1, lse.stride(0)) if cu_q is not None", "(0, 1, lse.stride(1)) if cu_q is not None"),
    _p("capped without a cap", SV, H, "softcap * LOG2E.value) if softcap", "LOG2E.value) if softcap"),
    _p("any scale", SV, H, "    if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32\n", "    if scale > 2.0e38:\n"),
    # -- GEMM: synchronisation
    _p("a turn is not waited for", GH, S, "        mbarrier.wait(turns.index(g), turn // 2 & 1)\n", "", 0, "turns full ring a b"),
    _p("a step given back too early", GH, S, "mbarrier.arrive(ring.empty.index((n + step - 1) % STAGES), count=1)", "mbarrier.arrive(ring.empty.index((n + step) % STAGES), count=1)", 0, "a b empty"),
    _p("a step waited for too weakly", GH, S, "sums = begun(done(sums, PRODUCTS))", "sums = begun(done(sums, PRODUCTS + 1))", 0, "a b"),
    _p("no fence before D is stored", GH, S, "        fence_async_shared()\n        mbarrier.arrive(slots.written", "        mbarrier.arrive(slots.written", 0, "tiles"),
    _p("store not waited for", GH, S, "                tma.store_wait(0)\n", "", 0, "tiles"),
    _p("C not waited for", GH, S, "        mbarrier.wait(slots.full.index(slot), lap & 1)\n", "        pass\n", 0, "tiles full"),
    _p("D's slot asked for a lap early", GH, S, "        mbarrier.wait(slots.empty.index(slot), lap & 1 ^ 1)\n    if anyhow", "        mbarrier.wait(slots.empty.index(slot), lap & 1)\n    if anyhow", 0, "tiles empty"),
    _p("the first turn is nobody's", GH, S, "    mbarrier.arrive(turns.index(0), count=1)  # the first turn\n", "", 0, "turns"),
    _p("pieces do not all release", "gemm_hopper_c32", S, "full, barriers(STAGES, PIECES))", "full, barriers(STAGES, 1))", 0, "empty a b"),
    _p("sums overwritten while they are read", GB, S, "            if part == C_PARTS - 1:\n", "            if part == 0:\n", 0, "sums places tiles"),
    _p("sums not waited for", GB, S, "        mbarrier.wait(sums.full.index(place), turn // ACCUMULATORS & 1)\n", "", 0, "places sums tiles"),
    _p("sums given back by nobody", GC, S, "                mbarrier.arrive(sums.empty.index(place), count=1)\n", "                pass\n", 0, "empty"),
    _p("slot of A and B committed before the product", GB, S, "            tcgen05_mma(a, b, sums.tiles.index(place), use_acc=use_sums)\n            tcgen05_commit(ring.empty.index(slot))\n", "            tcgen05_commit(ring.empty.index(slot))\n            tcgen05_mma(a, b, sums.tiles.index(place), use_acc=use_sums)\n", 0, "a b"),
    _p("sums committed before the last product", GC, S, "        tcgen05_commit(sums.full.index(place))\n", "        tcgen05_commit(sums.full.index((turn + 1) % ACCUMULATORS))\n", 0, "full sums places tiles"),
    # -- GEMM: addresses and numbers
    _p("rows of tiles walked together at the edge", GH, A, "    rows = gl.minimum(problem.rows - first, GROUP_M)\n", "    rows = GROUP_M\n"),
    _p("tiles counted down", GB, A, "gl.where(gl.program_id(0) < problem.last, 0, 1)", "gl.where(gl.program_id(0) + 1 < problem.last, 0, 1)"),
    _p("columns of another part", GH, A, "        sums = right if part >> halvings(sums.shape[1], WIDTH) - 1 & 1 else left\n", "        sums = left if part >> halvings(sums.shape[1], WIDTH) - 1 & 1 else right\n"),
    _p("B by the row of A", GB, A, "copy_tile(b_desc, [k, column] if B_ROWS else [column, k], there, b.index(slot))", "copy_tile(b_desc, [k, row] if B_ROWS else [row, k], there, b.index(slot))"),
    _p("A by columns not turned", GC, A, "            a = a if A_ROWS else a.permute((1, 0))\n", ""),
    _p("the first sums kept", GB, N, "        use_sums = False\n", "        use_sums = turn > 1\n"),
    _p("beta on the products", GH, N, "        products += c * problem.beta if SCALED else c\n", "        products = (products + c) * problem.beta if SCALED else products + c\n"),
    _p("alpha forgotten", GC, N, "        products = products * problem.alpha\n", "        products = products * 1.0\n"),
    _p("a k-step too few", GH, H, "    steps, rows_of_part = -(-a.shape[1] // TILE_K.value), shape[0]\n", "    steps, rows_of_part = max(a.shape[1] // TILE_K.value, 1), shape[0]\n"),
    _p("factors of 1 decided by alpha alone", GH, H, "        alpha != 1 or beta not in (0, 1),\n", "        alpha != 1,\n"),
    _p("c added although beta is 0", GB, H, "    adds = c is not None and beta != 0\n", "    adds = c is not None\n"),
    _p("D at any step in boxes", GB, H, "x.stride(0) > 0 and not x.stride(0) * x.element_size() % 16 and", "x.stride(0) > 0 and"),
    # -- 8 bits
    _p("V not waited for", H8, S, "    wait(tile.v, n)\n", "", 0, "v"),
    _p("V released before it is read", H8, S, "    part = warpgroup_mma_wait(0, deps=[part])\n    release(tile.v, n)\n", "    release(tile.v, n)\n    part = warpgroup_mma_wait(0, deps=[part])\n", 0, "v"),
    # Harmless before this kernel issued P V first: now the slot is given back, and filled again under the wait.
    _p("V waited for again once it is given back", H8, S, "    wait(tile.k, n + 1)\n    s = issue_qk", "    wait(tile.k, n + 1)\n    wait(tile.v, n)\n    s = issue_qk", 0, "v"),
    _p("turn passed by nobody in blocks of the other", H8, S, "        take_turn(turns, n - tiles)\n        pass_turn(turns)\n        n += 1\n", "        n += 1\n", 0, "turns mine next turn_barriers"),
    _p("last three quarters of P by half", B8, S, "    mbarrier.wait(softmax.p_rest, phase)\n", "", 0, "p_rest s"),
    _p("S read before it is there", B8, S, "            mbarrier.wait(softmax.s_full, s_phase)\n", "", 0, "s s_full"),
    _p("row factors released by the wrong group", B8, S, "        total0 = read(softmax0, n, softmax1)\n", "        total0 = read(softmax0, n, softmax0)\n", 0, "rows rows_empty rows_full"),
    _p("order of the keys of V", H8, A, "    return gl.reshape(gl.permute(pairs, (0, 1, 3, 2, 4)), [ROWS, TILE_N])\n", "    return gl.reshape(pairs, [ROWS, TILE_N])\n"),
    _p("factors of the query head", H8, A, "    place = own_copy(batch) * heads_kv + own_copy(head) // own_copy(problem.group)\n", "    place = own_copy(batch) * heads_kv + own_copy(head) % own_copy(problem.group)\n"),
    _p("zeros beyond the last key of V", H6, A, "mask=(rows < seqlen_k)[:, None], other=0.0).to(gl.int8", "mask=(rows < seqlen_k - 1)[:, None], other=0.0).to(gl.int8"),
    _p("place of a factor without its batch", B8, A, "    place = (batch * launched.heads_q + head) // launched.group  # of its key head\n", "    place = head // launched.group\n"),
    _p("lift lost in the log-sum-exp", B8, N, "gl.log2(total) - LIFT) * LN2", "gl.log2(total)) * LN2"),
    _p("factor of q twice", B8, N, "        scale_log2 *= gl.load(launched.k_descale + place * launched.k_step)\n", "        scale_log2 *= gl.load(launched.q_descale + place * launched.q_step)\n"),
    _p("O of the block before is not rescaled", H8, N, "    o = scaled(o, statistics.factor) + part\n", "    o = o + part\n"),
    _p("lift beyond what e4m3 holds", H6, N, "LIFT = gl.constexpr(-8.0)", "LIFT = gl.constexpr(-9.5)"),
    _p("rows grow further than P can", B8, N, "MAX_GROWTH = gl.constexpr(4.0)", "MAX_GROWTH = gl.constexpr(16.0)"),
    _p("the diagonal a key late", H8, M, "    end = gl.maximum(gl.minimum(position + 1, seqlen_k), 0)\n    return end // TILE_N\n", "    end = gl.maximum(gl.minimum(position + 2, seqlen_k), 0)\n    return end // TILE_N\n"),
    _p("left edge a key early", BW, M, "diagonal - problem.window_left", "diagonal - problem.window_left - 1", 1),
    _p("descale of one number for each head", H6, H, "    return factor.stride() if len(factor.shape) == 2 else (0, 0)\n", "    return factor.stride() if len(factor.shape) == 2 else (1, 1)\n"),
    # -- integers of 32 bits
    _p("32 bits to a row of O", H8, A, "rows.to(gl.int64) * own_copy(problem.stride_s)", "rows * own_copy(problem.stride_s)"),
    _p("32 bits to a head of O", B8, A, "head.to(gl.int64) * problem.stride_h", "head * problem.stride_h"),
    _p("32 bits to a sequence of Q", SV, A, "    offsets = query.to(gl.int64) * (rows.stride_qs * 8) + head * (rows.stride_qh * 8)\n", "    offsets = query * (rows.stride_qs * 8) + head * (rows.stride_qh * 8)\n"),
    _p("32 bits to the pages of a sequence", SV, A, "find_pages(batch.table + item.b.to(gl.int64) * batch.stride_table,", "find_pages(batch.table + item.b * batch.stride_table,"),
    # -- 16 bits, other kernels than before
    _p("every second block of keys waits for V's slot", HF, S, "    wait(tile.v, n)\n", "    if n % 2 == 0:\n        wait(tile.v, n)\n", 0, "v"),
    _p("Q of the last block released by the first warpgroup", HC, S, "        release(tile.q, tile.q_number)\n", "        release(tile.q, tile.q_number - 1)\n", 0, "q"),
    _p("first quarter of P stored over the second", BC, A, "        p.slice(0, QUARTER).store(a.to(dtype))\n", "        p.slice(QUARTER, QUARTER).store(a.to(dtype))\n"),
    _p("maximum of the block before", BC, N, "        row_max = next_max\n", "        row_max = new_max\n"),
    # -- gradients
    _p("K and V not waited for", HB, S, "    mbarrier.wait(shared.kv_full, 0)\n", "", 0, "k v kv_full"),
    _p("Q and dO not waited for", HB, S, "    mbarrier.wait(shared.full.index(slot), n // STAGES & 1)\n", "", 0, "q dout pieces full"),
    _p("no fence before dS is multiplied", HK, S, ".store(ds)\n    fence_async_shared()\n", ".store(ds)\n", 0, "ds"),
    _p("the other half of dS not waited for", HK, S, "    wait_for_ds(shared, n)\n    dq = issue_dq", "    dq = issue_dq", 0, "ds ds_full"),
    _p("Q and dO given back before dK", HK, S, "    dk = warpgroup_mma_wait(0, deps=[dk])\n    mbarrier.arrive(shared.empty.index(slot), count=1)\n", "    mbarrier.arrive(shared.empty.index(slot), count=1)\n    dk = warpgroup_mma_wait(0, deps=[dk])\n", 0, "q empty"),
    _p("dQ's slot not asked for", HB, S, "    mbarrier.wait(shared.dq_empty.index(n % DQ_SLOTS), n // DQ_SLOTS & 1 ^ 1)\n", "", 0, "dq dq_empty"),
    _p("programs do not wait for their turn", HB, S, "                wait_for_turn(counters + m, block)\n", "", 0, "sums new_empty"),
    _p("turn passed before the tile is added", HB, S, "            cp.async.bulk.wait_group 0;\n", "", 0, "sums dq new_empty"),
    _p("turn passed without a release", HK, S, "red.release.gpu", "red.relaxed.gpu", 0, "sums dq new_empty"),
    _p("a turn that waits for nothing", HK, S, "gl.where(in_order, turn, gl.minimum(turn, 1))", "gl.where(in_order, turn, gl.minimum(turn, 0))", 0, "sums new_empty"),
    _p("in order, programs wait for the first one only", HK, S, "gl.where(in_order, turn, gl.minimum(turn, 1))", "gl.minimum(turn, 1)", 0, "sums new_empty"),
    _p("the last part of a tile acquires nothing", "hopper_prefill_d64", S, 'gl.atomic_xchg(counter, 0, sem="acquire")', 'gl.atomic_xchg(counter, 0, sem="relaxed")', 0, "partials"),
    _p("parts merged before the last", "hopper_prefill_d64", A, "highest - lowest + 1)", "highest - lowest)"),
    _p("no fence between a turn and what is added", HK, S, "            fence.proxy.async.global;\n", "", 0, "sums new_empty"),
    _p("turn passed by nobody", HK, S, "                pass_turn(counters + m)\n", "", 0, "counters new_empty"),
    _p("stored gradients not waited for", HB, S, "rows)\n    tma.store_wait(0)\n", "rows)\n", 0, "ds rows"),
    _p("terms stored after they are announced", HK, S, "            shared.terms.index(slot).store(delta)\n            mbarrier.arrive(full, count=1)\n", "            mbarrier.arrive(full, count=1)\n            shared.terms.index(slot).store(delta)\n", 0, "terms"),
    _p("the only tile of pieces not waited for", HK, S, "            mbarrier.wait(shared.pieces_empty, n & 1 ^ 1)\n", "", 0, "pieces"),
    _p("V read again after dS has its memory", HB, S, "    k, v = k.load(operand), v.load(operand)\n", "    k = k.load(operand)\n", 0, "ds"),
    _p("results by way of the last step's dS", HB, S, "rows_in_ds(v_desc, ds_of(shared, steps, 0))", "rows_in_ds(v_desc, ds_of(shared, steps - 1, 0))", 0, "ds rows"),
    _p("half of the bytes of Q and dO", HK, S, "mbarrier.expect(\n                    full, q_desc.block_type.nbytes + dout_desc.block_type.nbytes + pieces_desc.block_type.nbytes\n                )", "mbarrier.expect(full, q_desc.block_type.nbytes + pieces_desc.block_type.nbytes)", 0, "full"),
    _p("a key beyond the last one", HB, M, "    return gl.where((keys <= last_key)[:, None], p, 0.0)\n", "    return gl.where((keys <= last_key + 1)[:, None], p, 0.0)\n"),
    _p("diagonal off by one", HK, M, "    return gl.where(keys[:, None] <= rows[None, :], p, 0.0)\n", "    return gl.where(keys[:, None] < rows[None, :], p, 0.0)\n"),
    _p("partial block only when it is empty", HB, M, "    partial = (block + 1) * TILE_N > seqlen_k\n", "    partial = block * TILE_N > seqlen_k\n"),
    _p("every program adds", HB, N, "                if turn == 0:\n", "                if turn < 0:\n"),
    _p("D forgotten", HK, N, "    ds = (p * (dp - delta[None, :])).to(dtype)\n", "    ds = (p * dp).to(dtype)\n"),
    _p("gradient of K not scaled", HB, N, "dk * problem.scale", "dk"),
    _p("gradient of the log-sum-exp added", HB, N, "    delta -= tl.load(dlse_ptr", "    delta += tl.load(dlse_ptr"),
    _p("second half of the queries with the first one's sums", HB, A, "issue_less(0, pieces_1, k, q_1)", "issue_less(0, pieces_0, k, q_1)"),
    _p("two pieces of three", HB, N, "    for i in tl.static_range(3):\n        piece", "    for i in tl.static_range(2):\n        piece"),
    _p("pieces of LSE where those of D are", HB, A, "issue_less(3, pieces_1,", "issue_less(0, pieces_1,"),
    _p("query head of a group", HB, A, "            copy_tile(dout_desc, [batch, head, row, 0], full, shared.dout.index(slot))\n", "            copy_tile(dout_desc, [batch, head_kv, row, 0], full, shared.dout.index(slot))\n"),
    _p("rows past the end not cleared", HB, A, "tl.store(dq_ptr + rows * (stride_dqs * 8) + tl.arange(0, HEAD_DIM)[None, :], dq, mask=row + rows < seqlen_q)", "tl.store(dq_ptr + rows * (stride_dqs * 8) + tl.arange(0, HEAD_DIM)[None, :], dq, mask=row + rows <= seqlen_q)"),
    _p("blocks of keys rounded down", HK, A, "return gl.cdiv(own_copy(problem.seqlen_k), TILE_N)", "return gl.maximum(own_copy(problem.seqlen_k) // TILE_N, 1)"),
    _p("scale of the scores for dQ", HB, H, "max(scale * LOG2E.value, 1e-37), scale, **options", "max(scale * LOG2E.value, 1e-37), scale * LOG2E.value, **options"),
    # -- what only the compiler refuses
    _p("too many registers", GH, C, "maxnreg\": 168", "maxnreg\": 32", 0, "spills maxnreg registers"),
    _p("registers of the roles", SV, C, "], [4, 1], [168, 104])", "], [4, 1], [240, 240])", 0, "registers"),
    _p("warps that a layout does not have", B8, C, "], [4, 4, 1, 1], [192, 192, 48, 48])", "], [4, 8, 1, 1], [192, 96, 48, 48])", 0, "warps layout"),
)  # fmt: skip

HARMLESS = (
    _p("waits the other way round", SV, X, "    wait_empty(items.q_empty, turn)\n    for piece", "    wait_empty(items.q_empty, turn)\n    fence_async_shared()\n    for piece"),
    _p("five slots", SV, X, "SLOTS = gl.constexpr(6)", "SLOTS = gl.constexpr(5)"),
    _p("every block masked", SV, X, "    if (key < whole_begin) | (key + TILE_N > whole_end):\n", "    if key >= 0:\n"),
    _p("every block of values cleared", SV, X, "    if key + TILE_N > item.k_len:\n", "    if key + TILE_N >= item.k_len:\n"),
    _p("release and acquire in one", SV, X, 'sem="release") == count - 1', 'sem="acq_rel") == count - 1'),
    _p("a fence before Q is given back", SW, X, "    arrive(items.q_empty, turn)\n", "    fence_async_shared()\n    arrive(items.q_empty, turn)\n"),
    _p("smaller splits", SV, X, "SPLIT, SPLIT_OF_MANY = 512, 1024", "SPLIT, SPLIT_OF_MANY = 256, 512"),
    _p("three slots of A and B", GH, X, "STAGES = gl.constexpr(4)", "STAGES = gl.constexpr(3)"),
    _p("tiles in plain order", GH, X, "GROUP_M = gl.constexpr(8)", "GROUP_M = gl.constexpr(1)"),
    _p("a store waited for in two ways", GH, X, "                tma.store_wait(0)\n", "                tma.store_wait(1)\n                tma.store_wait(0)\n"),
    _p("factors always", GB, X, "        alpha != 1 or beta not in (0, 1),\n", "        True,\n"),
    _p("one accumulator", GB, X, "ACCUMULATORS = gl.constexpr(2)", "ACCUMULATORS = gl.constexpr(1)"),
    _p("sums given back after the store", GB, X, "            if part == C_PARTS - 1:\n                mbarrier.arrive(sums.empty.index(place), count=1)\n            c = products\n", "            c = products\n            if part == C_PARTS - 1:\n                mbarrier.arrive(sums.empty.index(place), count=1)\n"),
    _p("every block hidden", H8, X, "            if end > whole_end:\n", "            if end >= whole_end:\n"),
    _p("the next K waited for before P V", H8, X, "    wait(tile.v, n)\n    part = issue_pv", "    wait(tile.k, n + 1)\n    wait(tile.v, n)\n    part = issue_pv"),
    _p("less lift", B8, X, "LIFT = gl.constexpr(4.0)", "LIFT = gl.constexpr(3.0)"),
    _p("maxima move at once", B8, X, "MAX_GROWTH = gl.constexpr(4.0)", "MAX_GROWTH = gl.constexpr(0.0)"),
    _p("less scale factors read", B8, X, "    # A hidden score, -inf, times 0 would be NaN.\n", "    scale_log2 *= 1.0\n"),
    _p("a smaller ring", B8, X, "KV_STAGES = gl.constexpr(26)", "KV_STAGES = gl.constexpr(7)"),
    _p("64 bits where 32 do", H8, X, "    rows = own_copy(row) + gl.arange(0, ROWS, layout=lse.type.layout)\n", "    rows = (own_copy(row) + gl.arange(0, ROWS, layout=lse.type.layout)).to(gl.int64)\n"),
    _p("K waited for twice", HB, X, "    mbarrier.wait(shared.kv_full, 0)\n", "    mbarrier.wait(shared.kv_full, 0)\n    mbarrier.wait(shared.kv_full, 0)\n"),
    _p("every block of keys masked", HK, X, "    partial = (block + 1) * TILE_N > seqlen_k\n", "    partial = (block + 1) * TILE_N > 0\n"),
    _p("one slot of dQ", HB, X, "DQ_SLOTS = gl.constexpr(2)", "DQ_SLOTS = gl.constexpr(1)"),
    _p("two heads abreast", HB, X, "HEADS_ABREAST, ANY_ORDER_ABREAST = 32, 8", "HEADS_ABREAST, ANY_ORDER_ABREAST = 2, 8"),
    # Written as bugs; the battery was quiet, and right: K is still held against V's length; each group's slot is released while the
    # other's is read; the compiler takes the K of an instruction from the operands.
    _p("V of another length accepted", B8, X, "    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, seqlen_k)\n", "    rows, keys = (batch, heads_q, seqlen_q), (batch, heads_kv, v.shape[2])\n"),
    _p("row statistics read a slot late", BF, X, "    values = softmax.rows.index(0).load(one_per_thread(STORE_COLUMNS))\n    mbarrier.arrive(released.rows_empty.index(0))\n", "    mbarrier.arrive(released.rows_empty.index(0))\n    values = softmax.rows.index(0).load(one_per_thread(STORE_COLUMNS))\n", 0, "rows rows_empty rows_full"),
    _p("an instruction shape that is none", GH, X, "part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 16])", "part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 8])", 0, "layout instr"),
)  # fmt: skip


def every() -> tuple[Planted, ...]:
    """All of them."""
    return (*FAMILIES, *HARMLESS)
