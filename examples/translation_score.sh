#!/usr/bin/env bash
# Print a translation.sh model's perplexity on val and BLEU on test_2016 in one line, and write it to RUN/score.txt.
#
#   examples/translation_score.sh DATA_DIR BIN RUN
#
# BIN is the output folder of fairseq-preprocess. RUN is the folder with checkpoint_last.pt.
set -euo pipefail

data=${1:?usage: examples/translation_score.sh DATA_DIR BIN RUN}
bin=${2:?} run=${3:?}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"

opened="--user-dir $root/user_dir --path $run/checkpoint_last.pt"
# shellcheck disable=SC2086 # the flags are words; the batches are those of validation in training
fairseq-validate "$bin" $opened --task moe_translation --max-tokens 2048 > "$run/validate.txt" 2>&1
# shellcheck disable=SC2086
fairseq-generate "$bin" $opened --gen-subset test --beam 5 --batch-size 64 \
    --required-batch-size-multiple 1 --remove-bpe sentencepiece > "$run/generate.txt" 2>&1
grep '^D-' "$run/generate.txt" | sort -V | cut -f 3 > "$run/test.en"
echo "dev perplexity $(grep -o ' ppl [0-9.]*' "$run/validate.txt" | tail -n 1 | cut -d' ' -f 3)," \
    "BLEU $(sacrebleu "$data/test_2016_flickr.en" -i "$run/test.en" --force -b -w 2)" | tee "$run/score.txt"
