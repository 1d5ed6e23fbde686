#!/usr/bin/env bash
# Compare dense and MoE language models with equal active FLOPs, steps and data.
#
#   examples/language_model.sh DATA_DIR [OUT]
#
# DATA_DIR has WikiText-2's test.txt and valid.txt, but no train split. So models are trained on test.txt, tuned on
# the first half of valid.txt, and evaluated on the second half. These are NOT the published splits.
# Environment: SEEDS (default "1 2 3"), MODELS ("dense moe"), EXTRA (more flags of fairseq-train, which
# win), OMP_NUM_THREADS (all cores).
set -euo pipefail

data=${1:?usage: examples/language_model.sh DATA_DIR [OUT]}
out=${2:-outputs/language_model}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
mkdir -p "$out"

if [ ! -e "$out/bin/dict.txt" ]; then
    half=$(($(wc -l < "$data/valid.txt") / 2))
    cp "$data/test.txt" "$out/train.txt"
    head -n "$half" "$data/valid.txt" > "$out/tune.txt"
    tail -n "+$((half + 1))" "$data/valid.txt" > "$out/report.txt"
    python "$root/examples/bpe.py" learn "$out/bpe" "$out/train.txt" --vocab-size 4000
    for split in train tune report; do
        python "$root/examples/bpe.py" apply "$out/bpe.model" < "$out/$split.txt" > "$out/$split.bpe"
    done
    fairseq-preprocess --only-source --destdir "$out/bin" --workers 2 \
        --trainpref "$out/train.bpe" --validpref "$out/tune.bpe" --testpref "$out/report.bpe"
fi

# Each token uses two of 8 experts, each half as wide as the dense layer: equal FLOPs per token.
# Learning rates and the weight of the balance loss are the best of those tried (docs/results.md).
declare -A model=(
    [dense]="--task language_modeling --arch transformer_lm --criterion cross_entropy --lr 0.008"
    [moe]="--task moe_language_modeling --arch moe_transformer_lm --criterion moe_cross_entropy --lr 0.006
           --moe-freq 1 --moe-expert-count 8 --moe-top-k 2 --moe-expert-ffn-dim 256
           --moe-gate-loss-wt 0.001"
)
shared="--user-dir $root/user_dir --decoder-layers 4 --decoder-embed-dim 128 --decoder-input-dim 128
    --decoder-output-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --decoder-normalize-before --share-decoder-input-output-embed --dropout 0.1
    --optimizer moe_adam --clip-norm 1 --weight-decay 0.01
    --lr-scheduler polynomial_decay --warmup-updates 60 --total-num-update 640 --max-update 640
    --tokens-per-sample 128 --batch-size 8 --max-epoch 2 --num-workers 0
    --no-epoch-checkpoints --log-format json --log-interval 20"

for seed in ${SEEDS:-1 2 3}; do
    for name in ${MODELS:-dense moe}; do
        run="$out/$name-$seed"
        rm -rf "$run"
        mkdir -p "$run"
        # shellcheck disable=SC2086 # the flags are words
        fairseq-train "$out/bin" ${model[$name]} $shared ${EXTRA:-} --seed "$seed" --save-dir "$run" \
            --log-file "$run/train.log" > "$run/output.txt" 2>&1
        fairseq-eval-lm "$out/bin" --user-dir "$root/user_dir" --path "$run/checkpoint_last.pt" \
            --gen-subset test --tokens-per-sample 128 --batch-size 16 > "$run/eval.txt" 2>&1
        echo "$name seed $seed: $(grep -o 'Perplexity: .*' "$run/eval.txt" | tee "$run/score.txt")," \
            "$(grep -o '"train_wall": "[0-9]*"' "$run/output.txt" | tail -n 1 | cut -d'"' -f 4) s of training"
    done
done
