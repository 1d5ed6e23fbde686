#!/usr/bin/env bash
# Compare residual and pyramid MoE (PR-MoE) with standard MoE, on the language model of language_model.sh and the
# translation model of translation.sh.
#
#   examples/prmoe.sh WIKITEXT_DIR MULTI30K_DIR [OUT]
#
# Active FLOPs are equal, because each token uses two networks of half the dense width: two experts (standard), or one
# expert and a dense part (residual). Results that OUT already has are skipped. Tables are printed at the end.
# On one core the language models (5 cases, 3 seeds) take about 20 minutes, the translation models (4 cases,
# 3 seeds) about 40.
# Environment: SEEDS ("1 2 3"), CASES (all), STUDIES ("language_model translation"), OMP_NUM_THREADS.
set -euo pipefail

usage="usage: examples/prmoe.sh WIKITEXT_DIR MULTI30K_DIR [OUT]"
declare -A data=([language_model]=${1:?$usage} [translation]=${2:?$usage})
out=${3:-outputs/prmoe}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"

# Short runs: one epoch of the language model, 250 of the translation model's 600 updates.
declare -A length=(
    [language_model]="--max-epoch 1 --max-update 320 --total-num-update 320 --disable-validation"
    [translation]="--max-update 250 --total-num-update 250 --disable-validation"
)
# Numbers of experts per layer, encoder first. `deep` has more experts in later layers, `shallow` in earlier ones.
declare -A deep=([language_model]=4,4,8,16 [translation]=4,8,16,4,8,16)
declare -A shallow=([language_model]=16,8,4,4 [translation]=16,8,4,16,8,4)
cases=${CASES:-standard residual pyramid both fewer inverted}

for study in ${STUDIES:-language_model translation}; do
    residual="--moe-top-k 1 --moe-residual"
    declare -A flags=(
        [standard]="--moe-expert-count 16"
        [residual]="--moe-expert-count 16 $residual"
        [pyramid]="--moe-expert-count ${deep[$study]}"
        [both]="--moe-expert-count ${deep[$study]} $residual"
        [inverted]="--moe-expert-count ${shallow[$study]}"
        [fewer]="--moe-expert-count 8"
    )
    mkdir -p "$out/$study/bin"
    for seed in ${SEEDS:-1 2 3}; do
        for name in $cases; do
            folder="$out/$study/$name"
            mkdir -p "$folder"
            ln -sfn ../bin "$folder/bin"
            [ -e "$folder/moe-$seed/score.txt" ] && continue
            MODELS=moe SEEDS=$seed EXTRA="${length[$study]} ${flags[$name]}" \
                "$root/examples/$study.sh" "${data[$study]}" "$folder" | sed "s/^moe/$study $name/"
            rm "$folder/moe-$seed/"*.pt
        done
    done
    # shellcheck disable=SC2046,SC2086 # one word for each case
    python "$root/examples/score_table.py" "$out/$study" $(printf '%s/moe:standard/moe ' $cases)
done
