#!/usr/bin/env bash
# Runs the packed tests on the GPUs of this machine: run.sh [arguments of the test binary].
# Needs bash and xz or python3, a GPU driver and, for CUDA, a CUDA 12 or 13 installation.
# RUNTIMES="cuda" limits what is run; UNPACK_DIR says where the binaries are unpacked.
set -uo pipefail

bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bin="${UNPACK_DIR:-$bundle/bin}"
export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

mkdir -p "$bin" || exit 1
for packed in "$bundle"/*.xz; do
    name="$(basename "$packed" .xz)"
    [ "$bin/$name" -nt "$packed" ] && continue
    if command -v xz >/dev/null; then
        xz --decompress --stdout "$packed" >"$bin/$name.part"
    else
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' \
            "$packed" >"$bin/$name.part"
    fi || { echo "cannot unpack $packed" >&2; exit 1; }
    chmod +x "$bin/$name.part" && mv "$bin/$name.part" "$bin/$name" || exit 1
done

failed=0
summary=""
for runtime in ${RUNTIMES:-@RUNTIMES@}; do
    echo "== $runtime"
    log="$bin/$runtime.log"
    FLASH_RUNTIME="$runtime" "$bin/test-attention" "$@" 2>&1 | tee "$log"
    status="${PIPESTATUS[0]}"
    [ "$status" -eq 0 ] || failed=1
    result="$(grep '^test result:' "$log" | tail -n 1)"
    device="$(FLASH_RUNTIME="$runtime" "$bin/test-attention" --exact runtime::describe --nocapture 2>&1 |
        sed -n 's/.*runtime: //p' | head -n 1)"
    summary+="$runtime (${device:-no device}): exit $status, ${result:-no result}"$'\n'
done
printf '\n%s' "$summary"
exit "$failed"
