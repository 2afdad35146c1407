"""What each knob of a forward kernel is, in a few words; docs/glossary.md says more."""

from __future__ import annotations

MEANINGS = {
    "tile_m": "query rows of a tile",
    "tile_n": "keys of an iteration",
    "softmax_tiles": "softmax tiles in flight, a warpgroup each",
    "split": "q: each softmax group has a query tile; k: they share one, by key blocks",
    "kv_stages": "slots of the ring of K and V (0, of fa4: as many as fit)",
    "cta_group": "2: two CTAs on neighbouring SMs multiply together",
    "emulated_share": "share of the exponentials computed on the FMA pipe",
    "poly_degree": "degree of the polynomial that computes them",
    "rescale": "O is rescaled in every block, where a row's maximum grew, or where its sums outgrow a limit",
    "rescale_threshold": "powers of two by which a row's maximum may grow before O is rescaled",
    "split_p": "P V starts when three quarters of P are written",
    "stats_slots": "buffers of row statistics between softmax and correction",
    "load_max": "the row maximum comes with the load from tensor memory (B300)",
    "mask_home": "where masked scores are hidden: in tensor memory or in registers",
    "scheduler": "how query tiles reach SMs",
    "warpgroups": "consumer warpgroups of 64 query rows",
    "q_stages": "2: the next query tile loads while this one is computed",
    "overlap": "Q K of the next block runs under the softmax of this one",
    "ping_pong": "warpgroups take turns: one's softmax under the other's products",
    "warps": "warps of a CTA",
    "intermediate_bytes": "bytes of an element of S and P in memory (0: those of the input)",
}
