#!/usr/bin/env bash
# Runs the packed tests on the GPUs of this machine, all of them in several processes, or
# run.sh [arguments of the test binary] in one. JOBS says how many processes.
# Needs bash and xz or python3, a GPU driver and, for CUDA, a CUDA 12 or 13 installation.
# RUNTIMES="cuda" limits what is run; UNPACK_DIR says where the binaries are unpacked.
set -uo pipefail

bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bin="${UNPACK_DIR:-$bundle/bin}"
export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# Burn tunes its own products for minutes; tests want their results alone.
export CUBECL_AUTOTUNE_LEVEL="${CUBECL_AUTOTUNE_LEVEL:-minimal}"

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

# Runs the tests named in file $1 and leaves the output in $1.log.
run_named() {
    [ -s "$1" ] || return 0
    xargs -a "$1" "$bin/test-attention" --exact --test-threads=2 --nocapture >"$1.log" 2>&1
}

# All tests, output in file $1. A process compiles its kernels one after the other, so they are dealt
# out to several; those with large tensors come last and alone.
run_all() {
    local jobs="${JOBS:-$((($(nproc) + 1) / 2))}" parts="$bin/parts" pids=() status=0
    rm -rf "$parts" && mkdir -p "$parts" || return 1
    "$bin/test-attention" --list --format terse 2>/dev/null | sed -n 's/: test$//p' >"$parts/names"
    [ -s "$parts/names" ] || { echo "no tests listed" | tee "$1"; return 1; }
    grep '^large::' "$parts/names" >"$parts/large"
    grep -v '^large::' "$parts/names" | split -n "r/$jobs" - "$parts/part."
    for part in "$parts"/part.*; do
        run_named "$part" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    run_named "$parts/large" || status=1
    cat "$parts"/*.log | tee "$1"
    return "$status"
}

# Adds up the closing lines of several processes.
total() {
    grep '^test result:' "$1" | awk '{ passed += $4; failed += $6 }
        END { if (NR) printf "%d passed; %d failed", passed, failed; else printf "no result" }'
}

failed=0
summary=""
for runtime in ${RUNTIMES:-@RUNTIMES@}; do
    echo "== $runtime"
    log="$bin/$runtime.log"
    export FLASH_RUNTIME="$runtime"
    if [ "$#" -eq 0 ]; then
        run_all "$log"
        status=$?
    else
        "$bin/test-attention" "$@" 2>&1 | tee "$log"
        status="${PIPESTATUS[0]}"
    fi
    [ "$status" -eq 0 ] || failed=1
    device="$("$bin/test-attention" --exact runtime::describe --nocapture 2>&1 |
        sed -n 's/.*runtime: //p' | head -n 1)"
    summary+="$runtime (${device:-no device}): exit $status, $(total "$log")"$'\n'
done
printf '\n%s' "$summary"
exit "$failed"
