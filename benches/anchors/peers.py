#!/usr/bin/env python3
"""What PyTorch's attention back-ends do on this GPU, on the grid of `benches/forward.rs`.

    python3 benches/anchors/peers.py --dtypes f16 --dims 64,128 --fwd-only > peers.txt
    cargo bench --bench forward --features cuda -- --peers peers.txt

A ratio between two programs is worth something only if both ran on the same machine in the same
session, so run this right before or after the benchmark. Needs PyTorch with CUDA.

One line per back-end and case, read by `benches/common/peers.rs`:

    cudnn float16 d=64 causal=0 n=1024 fwd 0.3488 ms 394.0 TF/s bwd 1.0041 ms 342.2 TF/s

or the same start and FAILED with the reason. With --queries the length reads `n=128x1024 bh=8`: 128
queries, 1024 keys, batch times heads. For `--small-shapes` of the benchmark:

    python3 benches/anchors/peers.py --batch 1 --heads 8 --queries 1,128,512,1024 \\
        --seqlens 1024,4096,16384,65536 --causal no --fwd-only > peers.txt

Throughput counts useful work by the FlashAttention papers' formula: 4 * batch * heads * n^2 * d (with
queries * n for n^2), halved when causal, times 2.5 for the backward pass.
"""

import argparse
import itertools
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 16_384  # batch * n
WIDTH = 2048  # heads * d
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "mem_eff": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
BATCHES = 5


def comma_list(convert):
    return lambda text: [convert(item) for item in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", type=comma_list(str), default=["f16", "bf16"])
    parser.add_argument("--dims", type=comma_list(int), default=[64, 128])
    parser.add_argument("--seqlens", type=comma_list(int), default=[1024, 4096, 16_384])
    parser.add_argument("--queries", type=comma_list(int), help="fewer than keys")
    parser.add_argument("--batch", type=int, help="instead of the grid's")
    parser.add_argument("--heads", type=int, help="instead of the grid's")
    parser.add_argument("--causal", choices=["both", "no", "yes"], default="both")
    parser.add_argument("--backends", type=comma_list(str), default=list(BACKENDS))
    parser.add_argument("--fwd-only", action="store_true", help="leave out the backward pass")
    parser.add_argument("--batch-ms", type=float, default=100, help="length of a timed batch")
    parser.add_argument("--budget", type=float, help="start no case after this many seconds")
    options = parser.parse_args()
    if options.queries and (options.causal != "no" or not options.fwd_only):
        # PyTorch's causal mask begins at the first key, ours ends at the last.
        parser.error("--queries needs --causal no and --fwd-only")
    for given, known in ((options.dtypes, DTYPES), (options.backends, BACKENDS)):
        for name in given:
            if name not in known:
                parser.error(f"{name} is none of {', '.join(known)}")
    return options


def seconds_per_call(call, batch_ms):
    """Median of BATCHES batches by CUDA events, each long enough to hide the events' own cost."""

    def batch(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    batch(2)  # compilation, cuDNN's plan, allocator
    count = 1
    while (seconds := batch(count)) < batch_ms / 8e3 and count < 4096:
        count *= 2
    count = max(1, round(batch_ms / 1e3 * count / seconds))
    return statistics.median(batch(count) / count for _ in range(BATCHES))


def throughput(label, seconds, flops):
    return f"{label} {seconds * 1e3:.4f} ms {flops / seconds / 1e12:.1f} TF/s"


def measure(backend, q, k, v, causal, flops, options):
    """The part of the line after the case."""

    def forward():
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    with sdpa_kernel(BACKENDS[backend]):
        with torch.no_grad():
            parts = [throughput("fwd", seconds_per_call(forward, options.batch_ms), flops)]
        if not options.fwd_only:
            out = forward()
            d_out = torch.randn_like(out)

            def backward():
                torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

            seconds = seconds_per_call(backward, options.batch_ms)
            parts.append(throughput("bwd", seconds, 2.5 * flops))
    return " ".join(parts)


def main():
    options = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device")
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda},",
        f"cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()},",
        f"float32 matmul precision {torch.get_float32_matmul_precision()}",
    )
    start = time.monotonic()
    causals = {"both": (False, True), "no": (False,), "yes": (True,)}[options.causal]
    for dtype, d, causal, n, queries in itertools.product(
        options.dtypes, options.dims, causals, options.seqlens, options.queries or [None]
    ):
        if queries is not None and queries > n:
            continue
        batch = options.batch or max(1, TOKENS // n)
        heads = options.heads or max(1, WIDTH // d)
        rows = queries or n
        flops = 4.0 * batch * heads * rows * n * d * (0.5 if causal else 1.0)
        q, k, v = (
            torch.randn(
                batch,
                heads,
                length,
                d,
                device="cuda",
                dtype=DTYPES[dtype],
                requires_grad=not options.fwd_only,
            )
            for length in (rows, n, n)
        )
        for backend in options.backends:
            if options.budget is not None and time.monotonic() - start > options.budget:
                print("the budget is spent")
                return
            name = str(DTYPES[dtype]).removeprefix("torch.")
            lengths = str(n) if rows == n else f"{rows}x{n}"
            # The grid's number of heads goes without saying.
            told = f" bh={batch * heads}" if options.batch or options.heads else ""
            case = f"{backend} {name} d={d} causal={int(causal)} n={lengths}{told}"
            try:
                result = measure(backend, q, k, v, causal, flops, options)
            except RuntimeError as error:  # out of memory is one too
                # A back-end refuses what it cannot do by a RuntimeError of several lines.
                result = "FAILED " + " ".join(str(error).split())[:120]
                torch.cuda.empty_cache()
            print(case, result, flush=True)


if __name__ == "__main__":
    main()
