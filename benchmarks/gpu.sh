#!/usr/bin/env bash
# What needs a GPU, on a machine with torch 2.11 or newer, triton and pytest; each part takes at most 4.5 minutes:
#
#     bash benchmarks/gpu.sh tests [FAIRSEQ_DIR]    all tests with the mark gpu, side by side
#     bash benchmarks/gpu.sh speed [FAIRSEQ_DIR]    kernel and host times of one layer, training speed, a table
#
# FAIRSEQ_DIR is a folder with fairseq and what it imports, if Python does not find them by itself. Without fairseq
# only the kernels' tests run, and no training. Every line is printed as it comes, and every step has a time limit.
# The exit status is 1 if a step failed.
cd "$(dirname "$0")/.." || exit 1
part=$1
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${2:+:$(realpath "$2")}${PYTHONPATH:+:$PYTHONPATH}"
END=265 # seconds of a part
status=0
lines=$(mktemp -d) || exit 1
trap 'rm -rf "$lines"' EXIT

python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "gpu.sh: torch finds no GPU here; run it on a machine that has one" >&2; exit 1; }
has() { python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

# step NAME SECONDS COMMAND...: run a command, for at most the rest of the part; its output is also kept.
step() {
    local name=$1 seconds=$2 left=$((END - SECONDS))
    shift 2
    [ "$left" -gt 0 ] || { echo "$name: not run, no time is left"; status=1; return; }
    timeout --kill-after=5 $((seconds < left ? seconds : left)) "$@" 2>&1 | tee -a "$lines/output"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { status=1; echo "$name: exit status $code (124: out of time)"; }
}

# Tests go to the processes in turn, because those of a file take about equally long.
run_tests() {
    local where=tests/kernels processes=12
    has fairseq && where=tests
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' "$where")
    python3 -m pytest -m gpu --collect-only -q "${files[@]}" > "$lines/collected" 2>&1 ||
        { cat "$lines/collected"; status=1; }
    grep '^tests/.*::' "$lines/collected" > "$lines/tests"
    local count
    count=$(wc -l < "$lines/tests")
    echo "$count tests in $processes processes"
    awk -v n="$processes" '{ print NR % n "\t" $0 }' "$lines/tests" | sort -s -n | cut -f 2- > "$lines/in_turn"
    # grep makes one write of each line, so that lines of several processes do not mix.
    step tests "$END" xargs -a "$lines/in_turn" -d '\n' -P "$processes" -n $(((count + processes - 1) / processes)) \
        bash -c 'set -o pipefail; python3 -m pytest -v --no-header --tb=short "$@" | grep --line-buffered ""' _
}

train() {
    local name=$1
    shift
    step "training, $name" 45 bash -c 'set -o pipefail; name=$1; shift; python3 -m fairseq_cli.train "$@" 2>&1 |
        grep --line-buffered -E "train_inner|Error|error:" |
        sed -u "s/.*train_inner | {/{\"case\": \"training\", \"variant\": \"$name\", /"' _ "$name" "$lines/bin" \
        --user-dir user_dir --decoder-layers 12 --decoder-embed-dim 1024 --decoder-input-dim 1024 \
        --decoder-output-dim 1024 --decoder-ffn-embed-dim 4096 --decoder-attention-heads 16 \
        --share-decoder-input-output-embed --lr 0.0003 --clip-norm 1 --tokens-per-sample 512 --batch-size 32 \
        --max-update 60 --log-format json --log-interval 10 --num-workers 0 --no-save --disable-validation \
        --distributed-world-size 1 --bf16 "$@"
}

measure_speed() {
    local speed=(python3 -m benchmarks.gpu_speed)
    step kernels 60 "${speed[@]}"
    step host 30 "${speed[@]}" --what host --cases S
    if has fairseq; then
        python3 - "$lines" <<'CORPUS'
import random, sys
draw = random.Random(1)
words = [f"w{i}" for i in range(8000)]
weights = [1 / (i + 1) for i in range(8000)]
for split, count in (("train", 8000), ("valid", 10)):
    with open(f"{sys.argv[1]}/{split}.txt", "w") as file:
        for _ in range(count):
            print(*draw.choices(words, weights, k=64), file=file)
CORPUS
        step corpus 30 python3 -m fairseq_cli.preprocess --only-source --trainpref "$lines/train.txt" \
            --validpref "$lines/valid.txt" --destdir "$lines/bin" --workers 8 > /dev/null
        train dense --task language_modeling --arch transformer_lm --criterion cross_entropy --optimizer adam
        train moe --task moe_language_modeling --arch moe_transformer_lm --criterion moe_cross_entropy \
            --optimizer moe_adam --moe-expert-count 8 --moe-top-k 1 --moe-freq 2
    fi
    # Last, and each by itself: some compile for long.
    for peer in scattermoe tutel liger_kernel megablocks; do
        has "$peer" && step "$peer" 25 "${speed[@]}" --variants "$peer"
    done
    "${speed[@]}" --table "$lines/output"
}

case $part in
    tests) run_tests ;;
    speed) measure_speed ;;
    *) echo "gpu.sh: the part is '$part'; give tests or speed" >&2; exit 2 ;;
esac
exit $status
