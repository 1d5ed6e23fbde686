#!/usr/bin/env bash
# From two parallel text files to a translation by a Mixture-of-Experts model, in a few minutes on two CPU cores.
#
#   examples/quickstart.sh [--upcycle] [--overwrite] [--help] [SOURCE TARGET [OUT]]
#
# Line n of SOURCE (such as my.de) and line n of TARGET (such as my.en) are translations of each other. The suffixes
# name the languages. Without files, a small German-English corpus is generated. OUT [outputs/quickstart] gets the
# pieces of words (bpe.model), the data for fairseq (data/), the checkpoints and the log of the model (model/), and
# report.html; --overwrite replaces them. The same command again continues a training that was interrupted. With
# --upcycle, a dense model is trained first, and its weights start the MoE model.
# Environment: UPDATES (300), VOCAB (--vocab-size: pieces of words, at most; 2000), OMP_NUM_THREADS (all cores).
set -euo pipefail

refuse() { echo "error: $1" >&2; exit 2; }
upcycle= overwrite= words=()
for word in "$@"; do
    case $word in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    --upcycle) upcycle=yes ;;
    --overwrite) overwrite=yes ;;
    -*) refuse "$word is no option; give --upcycle, --overwrite or none." ;;
    *) words+=("$word") ;;
    esac
done
set -- ${words[@]+"${words[@]}"}
[ $# -ne 1 ] && [ $# -le 3 ] || refuse "give SOURCE and TARGET, such as my.de my.en, and perhaps OUT; or nothing."
root=$(cd "$(dirname "$0")/.." && pwd)
PATH="$root/.venv/bin:$PATH"
out=${3:-outputs/quickstart}
updates=${UPDATES:-300} vocab=${VOCAB:-2000}
[[ "$updates" =~ ^[1-9][0-9]*$ ]] || refuse "UPDATES is $updates; give a number of at least 1."
[[ "$vocab" =~ ^[1-9][0-9]*$ ]] || refuse "VOCAB is $vocab; give a number of at least 1."
# All checks are done first, so that bad input does not change OUT.
if [ -e "$out" ] && [ ! -d "$out" ]; then refuse "OUT is $out, which is not a folder; give another name."; fi
parent=$out
while [ ! -e "$parent" ]; do parent=$(dirname "$parent"); done
[ -d "$parent" ] && [ -w "$parent" ] \
    || refuse "OUT is $out, but $parent is not a folder that can be written to; give another name."
command="$* $upcycle $updates $vocab $(cksum "${@:1:2}" 2>/dev/null < /dev/null || true)"
continued=
if [ -z "$overwrite" ] && [ "$(cat "$out/command.txt" 2>/dev/null)" = "$command" ]; then
    continued=yes
elif [ -z "$overwrite" ] && [ -n "$(ls -A "$out" 2>/dev/null)" ]; then
    refuse "OUT is $out, which has other files or another run; give another folder, or add --overwrite."
fi
if [ $# -gt 0 ]; then
    for file in "$1" "$2"; do
        [[ "$(basename "$file")" == *.* ]] || refuse "$file has no suffix; give it that of its language, such as .de."
        [ -f "$file" ] || refuse "$file does not exist; give a text file."
        [ -s "$file" ] || refuse "$file is empty; give a text file with one sentence per line."
        [ ! -d "$out" ] || [[ "$(realpath "$file")" != "$(realpath "$out")"/* ]] \
            || refuse "$file is in OUT, $out, whose files are replaced; give another folder as OUT."
        iconv -f UTF-8 -t UTF-8 "$file" > /dev/null 2>&1 || refuse "$file is not UTF-8; convert it with iconv."
    done
    [ "${1##*.}" != "${2##*.}" ] || refuse "both files end with .${1##*.}; give each the suffix of its language."
    lines=("$(sed -n '$=' "$1")" "$(sed -n '$=' "$2")")  # grep -c counts NUL bytes, too
    [ "${lines[0]}" = "${lines[1]}" ] \
        || refuse "$1 has ${lines[0]} lines, but $2 has ${lines[1]}; give translations line by line."
else
    mkdir -p "$out"
    python "$root/examples/small_corpus.py" "$out/corpus"
    set -- "$out/corpus/train.de" "$out/corpus/train.en"
fi
source=$1 target=$2 from=${1##*.} to=${2##*.}

step() { echo; echo "== $1"; }

step "1 of 5: cut words into pieces (sentencepiece), and keep some sentences for validation and test"
python "$root/examples/parallel_text.py" "$source" "$target" "$out" --vocab-size "$vocab"
[ -n "$continued" ] || rm -rf "$out/dense" "$out/model"
echo "$command" > "$out/command.txt"

step "2 of 5: binarize for fairseq (fairseq-preprocess)"
rm -rf "$out/data"
fairseq-preprocess --source-lang "$from" --target-lang "$to" --joined-dictionary --workers 2 --destdir "$out/data" \
    --trainpref "$out/pieces/train" --validpref "$out/pieces/valid" --testpref "$out/pieces/test" > "$out/preprocess.log" 2>&1 \
    || { tail -n 5 "$out/preprocess.log" >&2; exit 1; }
grep "sents" "$out/preprocess.log"

# The sizes of a model that trains in two minutes. For sizes of real models, see docs/from_dense.md.
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
    if grep -qs "done training" "$1/output.txt"; then return; fi
    trap 'echo "interrupted; start the same command again, without --overwrite, to continue." >&2; exit 130' INT
    mkdir -p "$1"
    fairseq-train "$out/data" --user-dir "$root/user_dir" "${shared[@]}" --total-num-update "$2" --max-update "$2" \
        --save-dir "$1" --log-file "$1/train.log" "${@:3}" 2>&1 | tee -i -a "$1/output.txt" \
        | (trap "" INT; python "$root/examples/progress.py" "$2") \
        || { tail -n 5 "$1/output.txt" >&2; exit 1; }
}

moe=(--task moe_translation --arch moe_transformer_iwslt_de_en --criterion moe_label_smoothed_cross_entropy)
if [ -n "$upcycle" ]; then
    step "3 of 5: train a dense model, then one with experts that starts from it"
    train "$out/dense" "$updates" --task translation --arch transformer_iwslt_de_en --criterion label_smoothed_cross_entropy
    python -m fairseq_tutel convert upcycle "$out/dense/checkpoint_best.pt" --output "$out/upcycled.pt" \
        --overwrite "${experts[@]}"
    start=(--finetune-from-model "$out/upcycled.pt")
else
    step "3 of 5: train a model with 8 experts per layer, $updates updates"
    start=()
fi
train "$out/model" "$updates" "${moe[@]}" "${experts[@]}" ${start[@]+"${start[@]}"}

step "4 of 5: score the test sentences, and draw curves and experts"
fairseq-generate "$out/data" --user-dir "$root/user_dir" --path "$out/model/checkpoint_best.pt" --beam 5 \
    --remove-bpe sentencepiece --required-batch-size-multiple 1 --num-workers 0 2>&1 | grep "^Generate"
python -m fairseq_tutel report "$out/model" --output "$out/report.html" --overwrite

step "5 of 5: translate in Python"
python "$root/examples/translate.py" "$out/model" "$out/plain/test.$from" "$out/plain/test.$to"
