#!/usr/bin/env bash
# Compare dense and MoE translation models with equal active FLOPs, steps and data.
#
#   examples/translation.sh DATA_DIR [OUT]
#
# DATA_DIR holds Multi30k German-English: {train,val,test_2016_flickr}.{de,en}. Prints perplexity on
# val and BLEU on test_2016 (sacrebleu on the unchanged text).
# Environment: SEEDS (default "1"), MODELS ("dense moe"; also "pregated"), EXTRA (more flags of
# fairseq-train, which win), OMP_NUM_THREADS (all cores).
set -euo pipefail

data=${1:?usage: examples/translation.sh DATA_DIR [OUT]}
out=${2:-outputs/translation}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
mkdir -p "$out"

if [ ! -e "$out/bin/dict.en.txt" ]; then
    python "$root/examples/bpe.py" learn "$out/bpe" "$data/train.de" "$data/train.en" --vocab-size 4000
    for split in train val test_2016_flickr; do
        for language in de en; do
            python "$root/examples/bpe.py" apply "$out/bpe.model" \
                < "$data/$split.$language" > "$out/$split.$language"
        done
    done
    fairseq-preprocess -s de -t en --joined-dictionary --destdir "$out/bin" --workers 2 \
        --trainpref "$out/train" --validpref "$out/val" --testpref "$out/test_2016_flickr"
fi

# Each token uses two of 8 experts, each half as wide as the dense layer: equal FLOPs per token.
declare -A model=(
    [dense]="--task translation --arch transformer_iwslt_de_en
             --criterion label_smoothed_cross_entropy"
    [moe]="--task moe_translation --arch moe_transformer_iwslt_de_en
           --criterion moe_label_smoothed_cross_entropy
           --moe-freq 1 --moe-expert-count 8 --moe-top-k 2 --moe-expert-ffn-dim 256"
)
model[pregated]="${model[moe]} --moe-pregate 1"
shared="--user-dir $root/user_dir --encoder-layers 3 --decoder-layers 3
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --encoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --encoder-normalize-before --decoder-normalize-before --share-all-embeddings --dropout 0.1
    --label-smoothing 0.1 --optimizer moe_adam --adam-betas (0.9,0.98) --clip-norm 1
    --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update 600
    --max-update 600 --max-tokens 2048 --num-workers 0
    --no-epoch-checkpoints --log-format json --log-interval 50"

for seed in ${SEEDS:-1}; do
    for name in ${MODELS:-dense moe}; do
        run="$out/$name-$seed"
        rm -rf "$run"
        mkdir -p "$run"
        # shellcheck disable=SC2086 # the flags are words
        fairseq-train "$out/bin" ${model[$name]} $shared ${EXTRA:-} --seed "$seed" --save-dir "$run" \
            --log-file "$run/train.log" > "$run/output.txt" 2>&1
        echo "$name seed $seed: $("$root/examples/translation_score.sh" "$data" "$out/bin" "$run")," \
            "$(grep -o '"train_wall": "[0-9]*"' "$run/output.txt" | tail -n 1 | cut -d'"' -f 4) s of training"
    done
done
