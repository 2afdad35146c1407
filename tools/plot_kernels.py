"""Bar chart of `h200_kernels.csv`: our kernels and their peers by head_dim, mask and sequence length.

python tools/plot_kernels.py docs/h200-kernels.png
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DATA = Path(__file__).parents[1] / "data" / "measured" / "h200_kernels.csv"
#: Label, how the kernel column starts, colour (Okabe and Ito's palette, readable without colour vision).
SERIES = (
    ("tilecast hopper_ws", "hopper_ws", "#D55E00"),
    ("cuDNN (torch SDPA)", "cuDNN", "#0072B2"),
    ("flash-attn-4 (sm_90 path)", "flash-attn-4", "#56B4E9"),
    ("FlashAttention-3 (vLLM)", "FlashAttention-3", "#009E73"),
    ("FlashAttention-2 (torch SDPA)", "FlashAttention-2", "#999999"),
    ("tilecast triton (portable)", "triton", "#E69F00"),
    ("FlexAttention", "FlexAttention", "#CCCCCC"),
)


def main() -> None:
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    dims = sorted({int(row["head_dim"]) for row in rows})
    lengths = sorted({int(row["seqlen"]) for row in rows})
    figure, axes = plt.subplots(len(dims), 2, figsize=(13, 10.5), sharex=True, constrained_layout=True)
    for line, dim in zip(axes, dims, strict=True):
        top = max(float(row["tflops"]) for row in rows if int(row["head_dim"]) == dim)
        for axis, causal in zip(line, ("0", "1"), strict=True):
            for place, (label, start, colour) in enumerate(SERIES):
                values = {
                    int(row["seqlen"]): float(row["tflops"])
                    for row in rows
                    if row["kernel"].startswith(start) and int(row["head_dim"]) == dim and row["causal"] == causal
                }
                heights = [values.get(length, 0.0) for length in lengths]
                bars = axis.bar([x + 0.14 * (place - 2.5) for x in range(len(lengths))], heights, 0.13, color=colour,
                                label=label, edgecolor="black", linewidth=0.3)  # fmt: skip
                if place == 0:
                    axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
            axis.set_title(f"head_dim {dim}, {'causal' if causal == '1' else 'no mask'}", fontsize=10)
            axis.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
            axis.set_ylim(0, top * 1.08)
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
        line[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length (16k tokens in all, hidden size 2048)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    first = rows[0]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(
        f"Attention forward, bf16, {first['gpu']}, {first['date']}: median of {first['rounds']} interleaved runs "
        f"(torch {first['torch']}, Triton {first['triton']}, driver {first['driver']})",
        fontsize=11,
    )
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
