"""A step's forecast as text and as a dictionary with stable keys."""

from __future__ import annotations

from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.runs import FEW_ROWS
from tilecast.model.step.answer import StepForecast
from tilecast.model.step.batch import requests_text, shortened
from tilecast.model.step.evaluate import LaunchRun
from tilecast.model.step.launches.variant import title

_BAR = 24
#: By machine: which measured steps its forecasts were validated against, and the command that does it again.
VALIDATED_AGAINST = {
    "h200-sxm": ("steps measured on an H200", "tilecast validate serving"),
    "h100-sxm": (
        "steps measured on an H100 that decode from bf16 and latent caches",
        "tilecast validate serving data/measured/h100_decode_runs.csv",
    ),
}
FLOOR = "a floor: norms, rotary embedding, activations, sampling and the engine's own time are left out"


def as_dict(f: StepForecast) -> dict[str, object]:
    """Keys documented in docs/json.md."""
    out: dict[str, object] = {
        "machine": f.machine.name,
        "requests": requests_text(f.batch.lengths),
        "sequences": len(f.batch.lengths),
        "heads": f.batch.heads.heads_q,
        "heads_kv": f.batch.heads.heads_kv,
        "head_dim": f.batch.heads.head_dim_qk,
        "head_dim_v": f.batch.heads.head_dim_v,
        "dtype": f.batch.heads.dtype,
        "page": f.batch.page,
        "cache": f.batch.cache,
        "latent": f.batch.latent,
        "regime": f.regime,
        "variant_origin": f.origin,
        "attention_us": f.seconds * 1e6,
        "memory_tbps": f.run.hbm_bytes / f.seconds / 1e12,
        "binding": {"kind": f.binding[0], "name": f.binding[1]},
        "parts": [{"cause": p.cause, "us": p.seconds * 1e6, "share": p.share} for p in f.parts],
        "launches": [_launch_dict(launch) for launch in f.run.launches],
        "splits": [{"split_keys": s.split_keys, "us": s.seconds * 1e6} for s in f.splits],
        "decoder": None,
        "next_request": None,
        "largest": None,
        "notes": [checked_note(f), *([FLOOR] if f.decoder else []), *_too_much(f)],
    }
    if f.decoder is not None:
        d = f.decoder
        out["decoder"] = {
            "name": d.decoder.name, "layers": d.decoder.layers, "step_ms": (f.step_seconds or 0.0) * 1e3,
            "attention_ms": d.decoder.layers * f.seconds * 1e3, "products_ms": d.seconds * 1e3,
            "weight_bytes": d.weight_bytes, "cache_bytes": d.cache_bytes,
        }  # fmt: skip
    if f.next_request is not None:
        n = f.next_request
        out["next_request"] = {
            "requests": n.requests, "attention_us": n.attention_seconds * 1e6,
            "step_us": None if n.step_seconds is None else n.step_seconds * 1e6, "cache_bytes": n.cache_bytes,
        }  # fmt: skip
    if f.largest is not None:
        most = f.largest
        out["largest"] = {
            "requests": most.requests, "within_ms": most.within_seconds * 1e3, "count": most.count,
            "ms": most.seconds * 1e3, "limit": most.limit,
        }  # fmt: skip
    return out


def checked_note(f: StepForecast) -> str:
    """What forecasts of steps on the machine were validated against."""
    if f.machine.name not in VALIDATED_AGAINST:
        return f"no step was measured on {f.machine.name} yet; forecasts were validated against those of an H200 and an H100 (tilecast validate serving)"
    words, command = VALIDATED_AGAINST[f.machine.name]
    return f"validated against {words} ({command})"


def _too_much(f: StepForecast) -> list[str]:
    """That weights and caches are more than the memory holds, where they are."""
    room = f.machine.get("hbm.capacity_gb", 0.0) * 1e9
    if f.decoder is None or not room or f.decoder.weight_bytes + f.decoder.cache_bytes <= room:
        return []
    boards = -(-(f.decoder.weight_bytes + f.decoder.cache_bytes) // room)
    return [
        f"weights and caches do not fit this memory, they fill {boards:.0f} such boards: the forecast is of one board that had room"
    ]


def _launch_dict(launch: LaunchRun) -> dict[str, object]:
    return {
        "variant": variant_text(launch.variant),
        "us": launch.seconds * 1e6,
        "clock_mhz": launch.clock.mhz,
        "sequences": launch.items.sequences if launch.items is not None else 0,
        "items": launch.items.count if launch.items is not None else 0,
        "parted": launch.dealt.parting is not None,
        "chained": launch.dealt.chained,
        "most_splits": launch.items.most_splits if launch.items is not None else 0,
        "programs": launch.programs,
        "slots": launch.slots,
        "hbm_bytes": launch.hbm_bytes,
        "l2_bytes": launch.l2_bytes,
        "block_cycles": launch.costs.periods[-1] / launch.costs.per_sm,
        "memory_block_cycles": launch.costs.memory_block * launch.costs.sms,
    }


def as_text(f: StepForecast) -> str:
    """The report `tilecast step` prints."""
    rate, memory = f.run.hbm_bytes / f.seconds / 1e12, sum(launch.memory_seconds for launch in f.run.launches)
    lines = [
        f"{f.machine.title}: {f.batch.label()}",
        f"  attention  {_time(f.seconds)} a layer   {rate:.3g} of {rate * f.seconds / memory:.3g} TB/s   {f.regime} clock",
        *_decoder_lines(f),
        *[_launch_line(launch) for launch in f.run.launches],
        "",
        f"Bound by {f.binding[1]} ({f.binding[0]})",
        "",
        "Where the time of attention goes",
        *(
            f"  {p.cause:<70}{p.seconds * 1e6:10.1f} us  {p.share:6.1%}  {'█' * max(0, round(p.share * _BAR))}".rstrip()
            for p in f.parts if p.share >= 0.0005
        ),
        *_split_lines(f), *_next_lines(f), "", f"Note: {checked_note(f)}.", *(f"Note: {words}." for words in _too_much(f)),
    ]  # fmt: skip
    return "\n".join(lines)


def _decoder_lines(f: StepForecast) -> list[str]:
    if f.decoder is None or f.step_seconds is None:
        return []
    d = f.decoder
    tokens = f.batch.queries / f.step_seconds
    return [
        f"  step       at least {_time(f.step_seconds)}: {d.decoder.layers} layers, attention {_time(d.decoder.layers * f.seconds)}, "
        f"products {_time(d.seconds)}   {tokens:.0f} tokens/s",
        f"  memory     weights {d.weight_bytes / 1e9:.1f} GB, caches {d.cache_bytes / 1e9:.1f} GB of "
        f"{f.machine.get('hbm.capacity_gb', 0.0):.0f} GB; {FLOOR}",
    ]


def _launch_line(launch: LaunchRun) -> str:
    what = "decode " if launch.dealt.least_rows == 1 or launch.dealt.most_rows <= FEW_ROWS else "prefill"
    head = f"  {what}    {_time(launch.seconds)}   {title(launch.variant)}, {launch.clock.mhz:.0f} MHz, "
    if launch.items is None:
        return head + f"no sequence for it: {launch.programs} programs find nothing to do"
    split = _split_text(launch, launch.items.most_splits)
    return head + f"{_count(launch.items.sequences)}{split}: {launch.items.count} items, {launch.slots} at once"


def _split_text(launch: LaunchRun, most: int) -> str:
    """How keys are split or parted, and whether a program takes in what it could have dealt out."""
    dealt = launch.dealt
    each = (
        f", keys in parts of at least {dealt.parting.keys}"
        if dealt.parting
        else f", split every {dealt.split_keys} keys"
    )
    if dealt.chained:
        return (
            each
            + ", one after the other in a program"
            + (", in runs" if dealt.teams else ", those of very long tiles in several" if dealt.longer else "")
        )
    return f"{each}{', at most' if dealt.parting else ' into at most'} {most}" if most > 1 else ""


def _split_lines(f: StepForecast) -> list[str]:
    if not f.splits:
        return []
    best = f.splits[0]
    rows = ", ".join(f"{s.split_keys}: {_time(s.seconds)} ({s.seconds / best.seconds:.2f}x)" for s in f.splits)
    return ["", f"Keys of a split: {rows}"]


def _next_lines(f: StepForecast) -> list[str]:
    lines = []
    if f.next_request is not None:
        n = f.next_request
        step = "" if n.step_seconds is None else f", the step {_time(n.step_seconds)}"
        # Beside a chunk a decode may cost nothing, give or take what rounding of rounds does.
        longer = f"{_time(n.attention_seconds)} longer" if n.attention_seconds >= 1e-7 else "no longer"
        lines += ["", f"{n.requests} more: attention of a layer {longer}{step}"]
    if f.largest is not None:
        most = f.largest
        what = "attention of a layer" if f.decoder is None else "the step"
        why = {
            "latency": "one more takes longer", "memory": "the memory holds no more", "sequences": "a batch holds no more",
        }[most.limit]  # fmt: skip
        parts = shortened(most.requests)
        lines.append(
            f"Within {_time(most.within_seconds)} for {what}: {most.count} times {parts} more, {_time(most.seconds)}; {why}"
        )
    return lines


def _time(seconds: float) -> str:
    """Four digits, in microseconds below one millisecond; a difference below a picosecond is none."""
    return f"{round(seconds * 1e6, 6) + 0.0:.4g} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _count(sequences: int) -> str:
    return "1 sequence" if sequences == 1 else f"{sequences} sequences"
