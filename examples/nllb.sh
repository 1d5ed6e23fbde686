#!/usr/bin/env bash
# From a released dense NLLB to a Mixture-of-Experts model that is fine-tuned on your own text, and back.
#
#   examples/nllb.sh [--overwrite] [SOURCE.deu_Latn TARGET.eng_Latn [OUT]]
#
# Line n of SOURCE and line n of TARGET are translations of each other. The suffixes are NLLB's codes of the languages.
# Without files, a small German-English corpus is generated. OUT [outputs/nllb] gets the imported model (dense/), the
# upcycled model (upcycled.pt), the data for fairseq (data/), the fine-tuned model (model/), and the model in the format
# of Hugging Face (export/), which transformers opens as NllbMoeForConditionalGeneration.
# Environment: NLLB, a folder with a released model, such as facebook/nllb-200-distilled-600M (a small random model with
# a tokenizer of its own); UPDATES (300); OMP_NUM_THREADS (all cores).
set -euo pipefail

usage() { echo "usage: examples/nllb.sh [--overwrite] [SOURCE.deu_Latn TARGET.eng_Latn [OUT]]; $1" >&2; exit 1; }
overwrite=
if [ "${1:-}" = --overwrite ]; then overwrite=yes; shift; fi
[ $# -ne 1 ] && [ $# -le 3 ] || usage "give both files, or none."
root=$(cd "$(dirname "$0")/.." && pwd)
PATH="$root/.venv/bin:$PATH"
out=${3:-outputs/nllb}
updates=${UPDATES:-300}
for file in "${@:1:2}"; do
    [ ! -d "$out" ] || [[ "$(realpath "$file")" != "$(realpath "$out")"/* ]] \
        || usage "$file is in OUT, $out, whose files are replaced; give another folder as OUT."
    [ -s "$file" ] || usage "$file does not exist or is empty."
done
[ -n "$overwrite" ] || [ -z "$(ls -A "$out" 2>/dev/null)" ] \
    || usage "OUT is $out, which is not empty; give another folder, or add --overwrite."
mkdir -p "$out"
if [ $# -eq 0 ]; then
    python "$root/examples/small_corpus.py" "$out/corpus"
    cp "$out/corpus/train.de" "$out/corpus/train.deu_Latn"
    cp "$out/corpus/train.en" "$out/corpus/train.eng_Latn"
    set -- "$out/corpus/train.deu_Latn" "$out/corpus/train.eng_Latn"
fi
source=$1 target=$2 from=${1##*.} to=${2##*.}
[ "$from" != "$to" ] || usage "both files end with .$from; give each the code of its language."
[ "$(wc -l < "$source")" = "$(wc -l < "$target")" ] || usage "the files differ in their number of lines."

size() { python -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$NLLB/config.json" "$1"; }
step() { echo; echo "== $1"; }

if [ -z "${NLLB:-}" ]; then
    step "0 of 6: a small random model in the format of NLLB"
    NLLB=$out/released
    python "$root/examples/small_nllb.py" "$NLLB" "$source" "$target" --languages "$from,$to"
fi

step "1 of 6: import the dense model"
python -m fairseq_tutel convert from-hf "$NLLB" --output "$out/dense" --overwrite

step "2 of 6: give every second layer 4 experts, two for each token"
# These options are those of NLLB-MoE, so that transformers can open the result.
python -m fairseq_tutel convert upcycle "$out/dense/model.pt" --output "$out/upcycled.pt" --overwrite \
    --moe-freq 2 --moe-expert-count 4 --moe-top-k 2

step "3 of 6: cut words into the model's pieces, and binarize for fairseq (fairseq-preprocess)"
python "$root/examples/parallel_text.py" "$source" "$target" "$out" \
    --sentencepiece-model "$out/dense/sentencepiece.bpe.model"
rm -rf "$out/data"
fairseq-preprocess --source-lang "$from" --target-lang "$to" --srcdict "$out/dense/dict.txt" \
    --tgtdict "$out/dense/dict.txt" --workers 2 --destdir "$out/data" \
    --trainpref "$out/pieces/train" --validpref "$out/pieces/valid" > "$out/preprocess.log" 2>&1 \
    || { tail -n 5 "$out/preprocess.log" >&2; exit 1; }
grep "sents" "$out/preprocess.log"

step "4 of 6: fine-tune the model with experts, $updates updates"
# The sizes of the model are those in config.json.
sizes=()
for side in encoder decoder; do
    sizes+=("--$side-layers" "$(size "${side}_layers")" "--$side-ffn-embed-dim" "$(size "${side}_ffn_dim")"
        "--$side-embed-dim" "$(size d_model)" "--$side-attention-heads" "$(size "${side}_attention_heads")"
        "--$side-normalize-before")
done
# In NLLB, a source begins with its language, and a target with </s> and its language.
rm -rf "$out/model" && mkdir -p "$out/model"
fairseq-train "$out/data" --user-dir "$root/user_dir" --finetune-from-model "$out/upcycled.pt" \
    --task moe_translation_multi_simple_epoch --langs "$from,$to" --lang-pairs "$from-$to" \
    --encoder-langtok src --decoder-langtok --criterion moe_label_smoothed_cross_entropy --label-smoothing 0.1 \
    --arch moe_transformer "${sizes[@]}" --share-all-embeddings --dropout 0.1 --max-tokens 2048 \
    --moe-freq 2 --moe-expert-count 4 --moe-top-k 2 \
    --optimizer moe_adam --adam-betas "(0.9,0.98)" --clip-norm 1 --lr "${LR:-0.003}" --lr-scheduler polynomial_decay \
    --bpe sentencepiece --sentencepiece-model "$out/dense/sentencepiece.bpe.model" --required-batch-size-multiple 1 \
    --warmup-updates 60 --total-num-update "$updates" --max-update "$updates" --num-workers 0 \
    --save-dir "$out/model" --no-epoch-checkpoints --log-format json --log-interval 20 \
    --log-file "$out/model/train.log" 2>&1 | tee "$out/model/output.txt" \
    | python "$root/examples/progress.py" "$updates" || { tail -n 5 "$out/model/output.txt" >&2; exit 1; }

step "5 of 6: translate in Python"
python "$root/examples/translate.py" "$out/model" "$out/plain/test.$from" "$out/plain/test.$to" --multilingual

step "6 of 6: export the model to the format of Hugging Face"
python -m fairseq_tutel convert to-hf "$out/model/checkpoint_best.pt" --tokenizer "$NLLB" --output "$out/export" --overwrite
