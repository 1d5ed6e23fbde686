#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with torch, triton, numpy and pytest alone, in under 9 minutes:
# the kernels' tests, then benchmarks.ops, then benchmarks.layer with its fixed configurations.
#
#     OUT=folder bash benchmarks/gpu.sh
#
# Every part has a time limit and leaves its own file in $OUT (benchmarks/results by default) as it comes; a part
# that fails or runs out of time does not stop the next. The exit status is 1 where any did, and gpu_parts.json
# says which. Compiled kernels and the timings of their configurations stay in $OUT/cache, so a second run with
# the same folder is faster.
cd "$(dirname "$0")/.." || exit 1

OUT=${OUT:-benchmarks/results}
mkdir -p "$OUT/cache" || exit 1
OUT=$(cd "$OUT" && pwd)
echo '*' > "$OUT/cache/.gitignore"
export TRITON_CACHE_DIR="$OUT/cache/triton" XDG_CACHE_HOME="$OUT/cache"
export FAIRSEQ_TUTEL_CACHE="$OUT/cache/tuning"

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch finds no GPU here; run it on a machine that has one" >&2
    exit 1
fi

status=0
parts=""
# part NAME SECONDS COMMAND...: its output is shown and kept in $OUT/gpu_NAME.txt.
part() {
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$OUT/gpu_$name.txt"
    local code=${PIPESTATUS[0]} passed=true took=$((SECONDS - begin))
    [ "$code" -eq 124 ] && echo "$name: stopped after its $seconds seconds"
    [ "$code" -eq 0 ] || { passed=false; status=1; }
    echo "$name: exit status $code after $took s"
    parts+="${parts:+,}
 \"$name\": {\"passed\": $passed, \"status\": $code, \"seconds\": $took, \"limit\": $seconds}"
    printf '{%s\n}\n' "$parts" > "$OUT/gpu_parts.json"
}

# Most of their time goes into compiling, which has cores enough: a process for each file.
part kernels 140 xargs -P 4 -n 1 python -m pytest -m gpu -q <<< "tests/kernels/test_gemm_gpu.py
    tests/kernels/test_route.py tests/kernels/test_triton.py tests/kernels/test_autotune.py"
# Long enough to compile and measure every configuration of a product: a training does so in its first steps, a
# few seconds a process. What ops found, layer reads.
export FAIRSEQ_TUTEL_TUNE_SECONDS=50
part ops 100 python -m benchmarks.ops --device cuda --json "$OUT/gpu_ops.json"
export FAIRSEQ_TUTEL_TUNE_SECONDS=90
part layer 290 python -m benchmarks.layer --device cuda --json "$OUT/gpu_layer.json"
exit $status
