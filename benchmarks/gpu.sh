#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with torch, triton, numpy and pytest alone, in under 9 minutes:
# the kernels' tests, then benchmarks.ops, then benchmarks.layer with its fixed configurations.
#
#     OUT=folder bash benchmarks/gpu.sh
#
# Every part has a time limit and leaves its own file in $OUT (benchmarks/results by default) as it comes; a part
# that fails or runs out of time does not stop the next. The exit status is 1 where any did, and gpu_parts.json
# says which. Results alone stand in $OUT, six files; compiled kernels and the timings of their configurations are
# kept in $CACHE, so a second run with the same one is faster.
cd "$(dirname "$0")/.." || exit 1

OUT=${OUT:-benchmarks/results}
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fairseq_tutel_gpu}
mkdir -p "$OUT" "$CACHE" || exit 1
OUT=$(cd "$OUT" && pwd)
CACHE=$(cd "$CACHE" && pwd)
export TRITON_CACHE_DIR="$CACHE/triton" XDG_CACHE_HOME="$CACHE" FAIRSEQ_TUTEL_CACHE="$CACHE/tuning"

# Triton builds a small extension of Python's for every kernel that it launches.
python3 - <<'CHECK' || exit 1
import os, shutil, sys, sysconfig
from pathlib import Path
compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
if not any(map(shutil.which, compilers)):
    sys.exit(f"gpu.sh: no C compiler ({' or '.join(compilers)}), which Triton needs; install one, or set CC")
header = Path(sysconfig.get_path("include")) / "Python.h"
if not header.exists():
    sys.exit(f"gpu.sh: {header} is missing, which Triton needs; install Python's headers (python3-dev)")
CHECK
if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
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

# Most of their time goes into compiling, which has cores enough: a process for each line.
part kernels 140 xargs -P 6 -L 1 python3 -m pytest -m gpu -q <<'LINES'
tests/kernels/test_gemm_gpu.py -k "any_number_of_rows"
tests/kernels/test_gemm_gpu.py -k "every_candidate"
tests/kernels/test_gemm_gpu.py -k "not any_number_of_rows and not every_candidate"
tests/kernels/test_route.py
tests/kernels/test_rows.py
tests/kernels/test_gate_product.py
tests/kernels/test_load_loss.py
tests/kernels/test_triton.py
tests/kernels/test_autotune.py
LINES
# Long enough to compile and measure every configuration of a product: a training does so in its first steps, a
# few seconds a process. What ops found, layer reads.
export FAIRSEQ_TUTEL_TUNE_SECONDS=50
part ops 100 python3 -m benchmarks.ops --device cuda --json "$OUT/gpu_ops.json"
export FAIRSEQ_TUTEL_TUNE_SECONDS=90
part layer 290 python3 -m benchmarks.layer --device cuda --json "$OUT/gpu_layer.json"
exit $status
