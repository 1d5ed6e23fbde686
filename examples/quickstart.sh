#!/usr/bin/env bash
# From two parallel text files to a translation by a Mixture-of-Experts model, in a few minutes on two CPU cores.
#
#   examples/quickstart.sh [--upcycle] [SOURCE TARGET [OUT]]
#
# Line n of SOURCE (such as my.de) and line n of TARGET (such as my.en) are translations of each other. The suffixes
# name the languages. Without files, a small German-English corpus is generated. OUT [outputs/quickstart] gets the
# pieces of words (bpe.model), the data for fairseq (data/), the checkpoints and the log of the model (model/), and
# report.html. With --upcycle, a dense model is trained first; its weights then start the model with experts.
# Environment: UPDATES (300), VOCAB (pieces of words, at most; 2000), OMP_NUM_THREADS (all cores).
set -euo pipefail

usage() { echo "usage: examples/quickstart.sh [--upcycle] [SOURCE.de TARGET.en [OUT]]; $1" >&2; exit 1; }
upcycle=
if [ "${1:-}" = --upcycle ]; then upcycle=yes; shift; fi
[ $# -ne 1 ] && [ $# -le 3 ] || usage "give both files, or none."
root=$(cd "$(dirname "$0")/.." && pwd)
PATH="$root/.venv/bin:$PATH"
out=${3:-outputs/quickstart}
updates=${UPDATES:-300}
mkdir -p "$out"
if [ $# -eq 0 ]; then
    python "$root/examples/small_corpus.py" "$out/corpus"
    set -- "$out/corpus/train.de" "$out/corpus/train.en"
fi
source=$1 target=$2 from=${1##*.} to=${2##*.}
for file in "$source" "$target"; do [ -s "$file" ] || usage "$file does not exist or is empty."; done
[ "$from" != "$to" ] || usage "both files end with .$from; give each the suffix of its language."
[ "$(wc -l < "$source")" = "$(wc -l < "$target")" ] || usage "the files differ in their number of lines."

step() { echo; echo "== $1"; }

step "1 of 5: cut words into pieces (sentencepiece), and keep some sentences for validation and test"
python "$root/examples/parallel_text.py" "$source" "$target" "$out" --vocab-size "${VOCAB:-2000}"

step "2 of 5: binarize for fairseq (fairseq-preprocess)"
rm -rf "$out/data"
fairseq-preprocess --source-lang "$from" --target-lang "$to" --joined-dictionary --workers 2 --destdir "$out/data" \
    --trainpref "$out/pieces/train" --validpref "$out/pieces/valid" --testpref "$out/pieces/test" 2>&1 | grep "sents"

# The size of a model of two minutes. For a real one, see docs/from_dense.md.
shared=(--max-tokens 2048 --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --encoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --encoder-normalize-before --decoder-normalize-before --share-all-embeddings --dropout 0.1
    --label-smoothing 0.1 --optimizer moe_adam --adam-betas "(0.9,0.98)" --clip-norm 1
    --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 60 --num-workers 0
    --bpe sentencepiece --sentencepiece-model "$out/bpe.model" --required-batch-size-multiple 1
    --no-epoch-checkpoints --log-format json --log-interval 20)
# Each token uses two of 8 experts, each half as wide as the dense layer: equal FLOPs per token.
experts=(--moe-freq 1 --moe-expert-count 8 --moe-top-k 2 --moe-expert-ffn-dim 256)

train() { # FOLDER UPDATES FLAGS...: train, and print a line per 20 updates; all output goes to FOLDER/output.txt
    rm -rf "$1" && mkdir -p "$1"
    fairseq-train "$out/data" --user-dir "$root/user_dir" "${shared[@]}" --total-num-update "$2" --max-update "$2" \
        --save-dir "$1" --log-file "$1/train.log" "${@:3}" 2>&1 | tee "$1/output.txt" \
        | python "$root/examples/progress.py" "$2" \
        || { tail -n 5 "$1/output.txt" >&2; exit 1; }
}

moe=(--task moe_translation --arch moe_transformer_iwslt_de_en --criterion moe_label_smoothed_cross_entropy)
if [ -n "$upcycle" ]; then
    step "3 of 5: train a dense model, then one with experts that starts from it"
    train "$out/dense" "$updates" --task translation --arch transformer_iwslt_de_en --criterion label_smoothed_cross_entropy
    python -m fairseq_tutel convert upcycle --input "$out/dense/checkpoint_best.pt" --output "$out/upcycled.pt" \
        --overwrite "${experts[@]}"
    start=(--finetune-from-model "$out/upcycled.pt")
else
    step "3 of 5: train a model with 8 experts per layer, $updates updates"
    start=()
fi
train "$out/model" "$updates" "${moe[@]}" "${experts[@]}" ${start[@]+"${start[@]}"}

step "4 of 5: score the test sentences, and draw curves and experts"
fairseq-generate "$out/data" --user-dir "$root/user_dir" --path "$out/model/checkpoint_best.pt" --beam 5 \
    --remove-bpe sentencepiece --num-workers 0 2>&1 | grep "^Generate"
python -m fairseq_tutel report "$out/model" --output "$out/report.html"

step "5 of 5: translate in Python"
python "$root/examples/translate.py" "$out/model" "$out/plain/test.$from" "$out/plain/test.$to"
