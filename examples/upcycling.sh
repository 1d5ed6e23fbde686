#!/usr/bin/env bash
# A dense language model trained on, against the same model upcycled to Mixture-of-Experts and trained on.
#
#   examples/upcycling.sh DATA_DIR [OUT]
#
# The dense model is that of language_model.sh. Each case begins with it and trains for UPDATES more; it is
# evaluated before and after. upcycling_table.py makes a table of them.
# Environment: SEEDS (default "1 2 3"), CASES (all), UPDATES, LR and EXTRA (of every case, for tuning).
set -euo pipefail

data=${1:?usage: examples/upcycling.sh DATA_DIR [OUT]}
out=${2:-outputs/upcycling}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-320}
mkdir -p "$out"

# What the experts are, and how they are made of the dense network: 512 wide, so that one expert of 512, or
# two of 256, are its arithmetic per token. A top-1 weight is a probability; 8 times that of an even gate is 1.
declare -A experts=(
    [parts]="--moe-expert-ffn-dim 256 --moe-top-k 2"
    [top1]="--moe-expert-ffn-dim 512 --moe-top-k 1 --moe-routed-scaling-factor 8"
    [top1-half-anew]="--moe-expert-ffn-dim 512 --moe-top-k 1 --moe-routed-scaling-factor 8"
    [top2]="--moe-expert-ffn-dim 512 --moe-top-k 2"
)
declare -A made=(
    [parts]=""
    [top1]="--gate-scale 0.01"
    [top1-half-anew]="--gate-scale 0.01 --reinitialize 0.5"
    [top2]=""
)
# Best on the tuning half (docs/results.md).
declare -A rate=([dense]=0.002 [parts]=0.002 [top1]=0.002 [top1-half-anew]=0.002 [top2]=0.002)

evaluate() { # CHECKPOINT OUTPUT
    fairseq-eval-lm "$out/bin" --user-dir "$root/user_dir" --path "$1" \
        --gen-subset test --tokens-per-sample 128 --batch-size 16 > "$2" 2>&1
}

for seed in ${SEEDS:-1 2 3}; do
    dense="$out/dense-$seed/checkpoint_last.pt"
    if [ ! -e "$dense" ]; then
        MODELS=dense SEEDS=$seed EXTRA="" "$root/examples/language_model.sh" "$data" "$out"
    fi
    for name in ${CASES:-dense parts top1 top1-half-anew top2}; do
        folder="$out/$name"
        mkdir -p "$folder"
        ln -sfn ../bin "$folder/bin"
        start="$folder/start-$seed.pt"
        model=moe more=""
        if [ "$name" = dense ]; then
            model=dense
            cp "$dense" "$start"
        else
            more="--moe-freq 1 --moe-expert-count 8 ${experts[$name]}"
            # shellcheck disable=SC2086 # the flags are words
            python -m fairseq_tutel convert upcycle --input "$dense" --output "$start" --seed "$seed" \
                $more ${made[$name]} > "$folder/convert-$seed.txt" 2>&1
        fi
        evaluate "$start" "$folder/start-$seed.txt"
        more="$more --finetune-from-model $start --lr ${LR:-${rate[$name]}} --max-update $updates
            --total-num-update $updates"
        MODELS=$model SEEDS=$seed EXTRA="$more ${EXTRA:-}" \
            "$root/examples/language_model.sh" "$data" "$folder" | sed "s/^$model/$name/"
        rm "$start" "$folder/$model-$seed/"*.pt
    done
done
