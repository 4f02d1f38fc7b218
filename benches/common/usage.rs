//! What `--help` prints.

use super::grid::Pass;

const OPTIONS: &str = "\
  FLASH_RUNTIME=cuda|vulkan|wgpu picks the runtime.

  --dtype LIST      of f16,bf16,f32,tf32         (default f16,bf16); tf32 is f32 with leave for ours to
                    multiply in tf32: the path of a result tells whether it did
  --dims LIST       head dimensions              (default 64,128)
  --seqlens LIST    sequence lengths             (default 1024,4096,16384)
  --causal WHICH    both, no or yes              (default both)
  --units WHICH     ours with all kernels that the device can run (default), or mma: with those for
                    devices before sm_90, on CUDA, not f32
  --tile QxK        ours with tiles of Q queries and K keys instead of the table's, on CUDA, not f32:
                    64 (but for sm_90's own kernels), 128, 192 or 256 queries, a multiple of 16 keys
                    up to 256
  --queries LIST    of the forward pass, fewer than keys; all pairs with --seqlens (default: as keys)
  --splits N        ours with keys in N parts instead of the table's
  --schedule WHICH  of the gradient: deterministic (default), or fused where it can run
  --small           tiny shapes for a CPU device (dtype f32, dims 64, seqlens 64,256)
  --small-shapes    B 1, H 8, queries 1,128,512,1024, seqlens 1024,4096,16384,65536, not causal
  --limit SECONDS   for one series on one case, its compilation and autotuning included
                    (default 240); past it the case is 'not finished'
  --budget SECONDS  for the whole run: stop the case at hand, 'skip' the rest
  --batch-ms MS     least length of a timed batch (default 200, with --small 20)
  --ceiling TFLOPS  a faster result is 'impossible' (default 1500)
  --in-process      no child processes and no limit: for profilers and sanitizers
  --out FILE        one JSON object per line
  --plot FILE       SVG of TFLOP/s against sequence length
  --peers FILE      output of benches/anchors/peers.py from the same machine: adds ratios
";

/// What `--help` prints.
pub fn usage(pass: Pass) -> String {
    let (what, only) = match pass {
        Pass::Forward => (
            "Times attention forward: our kernel (ours), our op in Burn (op), Burn's own op (burn).",
            "of ours,op,burn              (default all three)",
        ),
        Pass::Backward => (
            "Times the gradient of attention: our kernels delta, dq and dkv (ours), and forward and\n\
             backward under Burn's autodiff with our op (op) and with Burn's own (burn).",
            "of ours,op,burn              (default), and for profiling dq and dkv,\n  \
             \u{20}                 each with the delta before it, and delta alone",
        ),
    };
    let name = pass.name();
    format!(
        "{what}\n\n  cargo bench --bench {name} [--features cuda|vulkan] -- [options]\n  {OPTIONS}  \
         --only LIST       {only}\n"
    )
}
