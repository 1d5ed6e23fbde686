#!/usr/bin/env bash
# Compare a conventional MoE translation model with pre-gated ones: converted and fine-tuned, and pre-gated from
# the start.
#
#   examples/pregated.sh DATA_DIR [OUT]
#
# DATA_DIR and the models are those of translation.sh. The conventional model is trained further from the same
# checkpoint, with as many updates and the same schedule as the fine-tuned model. Results that OUT already has are
# skipped. A table is printed at the end.
# Environment: UPDATES of fine-tuning (200), SEEDS ("1 2 3"), OMP_NUM_THREADS (all cores).
set -euo pipefail

data=${1:?usage: examples/pregated.sh DATA_DIR [OUT]}
out=${2:-outputs/pregated}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-200}

train() { # FOLDER MODEL SEED [FLAG…]
    [ -e "$1/$2-$3/score.txt" ] || MODELS=$2 SEEDS=$3 EXTRA="${*:4}" "$root/examples/translation.sh" "$data" "$1"
}

for seed in ${SEEDS:-1 2 3}; do
    train "$out" moe "$seed"
    train "$out" pregated "$seed"
    run="$out/converted-$seed"
    mkdir -p "$run" "$out/tuned"
    ln -sfn ../bin "$out/tuned/bin"
    if [ ! -e "$run/score.txt" ]; then
        python -m fairseq_tutel convert pregate "$out/moe-$seed/checkpoint_last.pt" --moe-pregate 1 --overwrite \
            --output "$run/checkpoint_last.pt"
        echo "converted seed $seed: $("$root/examples/translation_score.sh" "$data" "$out/bin" "$run")"
    fi
    for name in moe pregated; do
        start=$([ "$name" = moe ] && echo moe || echo converted)
        train "$out/tuned" "$name" "$seed" --finetune-from-model "$(realpath "$out/$start-$seed/checkpoint_last.pt")" \
            --lr 0.003 --warmup-updates 20 --total-num-update "$updates" --max-update "$updates"
    done
done
python "$root/examples/score_table.py" "$out" moe pregated:moe converted:moe tuned/moe tuned/pregated:tuned/moe
