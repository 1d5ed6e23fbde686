#!/usr/bin/env bash
# Compare drop policies and balance losses on the language model of language_model.sh, with two layers and one
# epoch.
#
#   examples/routing_study.sh DATA_DIR [OUT]
#
# Each case is trained with each of SEEDS (default "1 2 3") and evaluated twice: with its training capacity and
# without dropping. routing_table.py prints a table.
set -euo pipefail

data=${1:?usage: examples/routing_study.sh DATA_DIR [OUT]}
out=${2:-outputs/routing_study}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
mkdir -p "$out"

declare -A cases=([dropless-gshard]="")
for factor in 0.5 1 1.25; do
    for policy in position bpr rts probability; do
        cases[$factor-$policy]="--moe-capacity-factor $factor --moe-drop-policy $policy"
    done
done
declare -A losses=(
    [none]="--moe-balance-loss none"
    [bias]="--moe-balance-loss none --moe-balance-bias --moe-bias-update-rate 0.005"
    [z]="--moe-balance-loss gshard:1,z:0.1"
    [sequence]="--moe-balance-loss gshard_sequence:1"
    [importance]="--moe-balance-loss load_importance:1 --moe-gate-noise 1"
)
for loss in "${!losses[@]}"; do
    cases[dropless-$loss]=${losses[$loss]}
    case $loss in none | bias) cases[1-position-$loss]="--moe-capacity-factor 1 ${losses[$loss]}" ;; esac
done

length="--decoder-layers 2 --max-update 320 --total-num-update 320 --max-epoch 1 --moe-gate-loss-wt 0.01"
for seed in ${SEEDS:-1 2 3}; do
    for name in $(printf '%s\n' "${!cases[@]}" | sort); do
        folder="$out/$name"
        mkdir -p "$folder"
        if [ -d "$out/bin" ]; then ln -sfn ../bin "$folder/bin"; fi
        [ -e "$folder/moe-$seed/dropless.txt" ] && continue
        MODELS=moe SEEDS=$seed EXTRA="$length --moe-eval-capacity-token-fraction -1 ${cases[$name]}" \
            "$root/examples/language_model.sh" "$data" "$folder" | sed "s/^moe/$name/"
        if [ ! -e "$out/bin" ]; then mv "$folder/bin" "$out/bin"; fi
        fairseq-eval-lm "$out/bin" --user-dir "$root/user_dir" --path "$folder/moe-$seed/checkpoint_last.pt" \
            --gen-subset test --tokens-per-sample 128 --batch-size 16 \
            --model-overrides "{'moe_eval_capacity_token_fraction': 0}" > "$folder/eval.txt" 2>&1
        mv "$folder/eval.txt" "$folder/moe-$seed/dropless.txt"
        rm "$folder/moe-$seed/"*.pt
    done
done
