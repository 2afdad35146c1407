"""Tokens per second of a small decoder that generates through transformers' continuous batching (paged cache), by attention.

    python tools/h200_generate.py OUT.csv [--layers 4] [--requests 64] [--new-tokens 128] [--rounds 5] [--attention tilecast,sdpa]

The decoder has the shapes of Llama-3-8B with fewer layers and random weights; prompts have 64 to 2048 tokens, drawn with a fixed seed.
`generate_batch`'s manager runs warm and without prefix sharing, one attention after the other; a round is the time from handing
over all prompts to the last answer.  Tokens are held against float32's: `agree` is the share that float32 picks as well among those
where its first choice leads its second by `--margin`; `same_alone` the share of some requests' tokens that come out alone too.
--attention: tilecast, sdpa, and what transformers knows by name (flash_attention_4 where flash-attn-4 is installed).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from measuring import csv_table, nvidia_smi

PAGE, MOST_TOKENS, ALONE = 64, 2048, 4
FIELDS = ("gpu", "date", "driver", "torch", "triton", "transformers", "attention", "layers", "requests", "prompt_tokens", "new_tokens",
          "rounds", "tokens_per_second", "low", "high", "seconds", "agree", "compared", "same_alone", "sm_clock_mhz")  # fmt: skip


def decoder(layers: int) -> Any:
    """The model, bfloat16, on the GPU."""
    import torch
    import transformers

    from tilecast.model.step.decoder import decoders

    shape = decoders()["llama3-8b"]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rope_theta=500000.0,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """Token numbers of so many prompts of 64 to 2048 tokens, the same at every call."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(64, 2048))] for _ in range(count)]


def answers_of(manager: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Generated tokens of each prompt."""
    names = manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread ended early")
    return [found[name] for name in names]


def run(model: Any, attention: str, prompts: list[list[int]], new_tokens: int, rounds: int) -> tuple[list[float], list[list[int]], list[list[int]]]:  # fmt: skip
    """(seconds of each round, tokens of each prompt, tokens of the first prompts alone)."""
    import inspect

    import transformers

    if attention == "tilecast":
        from tilecast.kernels.engines import transformers_paged

        transformers_paged.register()
        attention = transformers_paged.NAME
    model.set_attn_implementation("paged|sdpa" if attention == "sdpa" else attention)
    pages = sum(-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts)
    known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    settings: dict[str, Any] = {"page_size" if "page_size" in known else "block_size": PAGE}
    batching = transformers.ContinuousBatchingConfig(
        **settings, num_blocks=pages + 64, max_batch_tokens=MOST_TOKENS, allow_block_sharing=False
    )
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seconds = []
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        answers_of(manager, prompts, new_tokens)
        for _ in range(rounds):
            begin = time.perf_counter()
            made = answers_of(manager, prompts, new_tokens)
            seconds.append(time.perf_counter() - begin)
        alone = [answers_of(manager, [prompt], new_tokens)[0] for prompt in prompts[:ALONE]]
    return seconds, made, alone


def agreement(exact: Any, prompts: list[list[int]], made: list[list[int]], margin: float) -> tuple[int, int]:
    """(tokens that float32 picks too, tokens where its choice is clear) over some prompts."""
    import torch

    agree = clear = 0
    for prompt, tokens in zip(prompts, made, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens]], device="cuda")
            scores = exact(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        best = scores.topk(2)
        sure = (best.values[:, 0] - best.values[:, 1]) > margin
        agree += int((sure & (best.indices[:, 0] == torch.tensor(tokens, device="cuda"))).sum())
        clear += int(sure.sum())
    return agree, clear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--margin", type=float, default=0.25)
    parser.add_argument("--attention", default="tilecast,sdpa")
    given = parser.parse_args()
    import copy

    import transformers

    model = decoder(given.layers)
    prompts = prompts_of(given.requests, model.config.vocab_size)
    same = {
        "transformers": transformers.__version__, "layers": given.layers,
        "requests": given.requests, "prompt_tokens": sum(map(len, prompts)), "new_tokens": given.new_tokens, "rounds": given.rounds,
    }  # fmt: skip
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("sdpa")
    with csv_table(given.out, FIELDS) as add:
        for attention in given.attention.split(","):
            seconds, made, alone = run(model, attention, prompts, given.new_tokens, given.rounds)
            agree, clear = agreement(exact, prompts, made, given.margin)
            kept = sum(a == b for one, other in zip(alone, made, strict=False) for a, b in zip(one, other, strict=True))
            total = given.requests * given.new_tokens
            row = {
                **same, "attention": attention, "seconds": round(statistics.median(seconds), 4),
                "tokens_per_second": round(total / statistics.median(seconds), 1), "low": round(total / max(seconds), 1),
                "high": round(total / min(seconds), 1), "agree": round(agree / max(clear, 1), 5), "compared": clear,
                "same_alone": round(kept / (len(alone) * given.new_tokens), 4), "sm_clock_mhz": nvidia_smi("clocks.sm"),
            }  # fmt: skip
            add(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
