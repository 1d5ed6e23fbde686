#!/usr/bin/env bash
# Compare dense and MoE models on one task and on several, as in Z-code, with equal active FLOPs and steps.
#
#   examples/zcode.sh DATA_DIR [OUT]
#
# DATA_DIR is that of translation.sh. One task is German to English. Several tasks add English to German and
# denoising of both languages: translation from xde and xen, German and English with words deleted and moved.
# The recipe is configs/args/zcode_small.args. Prints the perplexity of each direction on val and the BLEU on
# test_2016, and draws OUT/report.html with the load of every expert by direction. Skips results that OUT has.
# 400 updates with 3 seeds take about 55 minutes on one core.
# Environment: SEEDS ("1 2 3"), UPDATES (300), OMP_NUM_THREADS (all cores).
set -euo pipefail

data=${1:?usage: examples/zcode.sh DATA_DIR [OUT]}
out=${2:-outputs/zcode}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-300}
mkdir -p "$out"

if [ ! -e "$out/bin" ]; then
    rm -rf "$out/bin.part" # an interrupted run may have left this folder
    python "$root/examples/bpe.py" learn "$out/bpe" "$data/train.de" "$data/train.en" --vocab-size 4000
    pieces() { python "$root/examples/bpe.py" apply "$out/bpe.model"; }
    for split in train val test_2016_flickr; do
        for language in de en; do
            pieces < "$data/$split.$language" > "$out/$split.$language"
            python "$root/examples/noise.py" < "$data/$split.$language" | pieces > "$out/$split.x$language"
        done
    done
    binarize() { # SOURCE TARGET [FLAG…]
        fairseq-preprocess -s "$1" -t "$2" --destdir "$out/bin.part" --workers 2 "${@:3}" \
            --trainpref "$out/train" --validpref "$out/val" --testpref "$out/test_2016_flickr"
    }
    binarize de en --joined-dictionary
    for language in de en; do
        binarize "x$language" "$language" --srcdict "$out/bin.part/dict.de.txt" --tgtdict "$out/bin.part/dict.de.txt"
    done
    mv "$out/bin.part" "$out/bin"
fi

shared="--user-dir $root/user_dir --max-update $updates --total-num-update $updates --disable-validation"
opened="--user-dir $root/user_dir --task moe_translation_multi_simple_epoch --langs de,en,xde,xen
    --encoder-langtok src --decoder-langtok"
declare -A directions=([one]=de-en [several]="de-en en-de xde-de xen-en")
recipe="$root/configs/args/zcode_small.args"
train() { # NAME FLAG…; the dense model has the recipe's flags without those of experts
    { case $1 in
        moe) cat "$recipe" ;;
        dense) sed -E 's/moe_(transformer|translation|label)/\1/g; s/--moe-[a-z-]+ [^ ]+//g' "$recipe" ;;
    esac; echo "${@:2}"; } | xargs fairseq-train "$out/bin"
}

table=()
for seed in ${SEEDS:-1 2 3}; do
    for tasks in one several; do
        for name in dense moe; do
            run="$out/$tasks/$name-$seed"
            pairs=${directions[$tasks]}
            mkdir -p "$run"
            for pair in $pairs; do # rows of the table, which compares MoE with dense
                row="$tasks/$name/$pair"
                table+=("$row$([ "$name" = moe ] && echo ":$tasks/dense/$pair" || true)")
            done
            [ -e "$run/done" ] && continue
            # If a finished run were started again, it would run another update.
            # shellcheck disable=SC2086 # the flags are words
            [ -e "$run/trained" ] || train "$name" $shared --lang-pairs "${pairs// /,}" --seed "$seed" \
                --save-dir "$run" --log-file "$run/train.log" > "$run/output.txt" 2>&1
            touch "$run/trained"
            for pair in $pairs; do
                direction="$opened --path $run/checkpoint_last.pt --lang-pairs $pair"
                # shellcheck disable=SC2086
                fairseq-validate "$out/bin" $direction --max-tokens 2048 --log-format json > "$run/$pair.txt" 2>&1
                score="perplexity $(grep -o '"valid_ppl": "[0-9.]*"' "$run/$pair.txt" | cut -d'"' -f 4)"
                case $pair in de-en | en-de)
                    # shellcheck disable=SC2086
                    fairseq-generate "$out/bin" $direction -s "${pair%-*}" -t "${pair#*-}" --gen-subset test \
                        --beam 5 --batch-size 64 --required-batch-size-multiple 1 --remove-bpe sentencepiece \
                        > "$run/generate.out" 2>&1
                    grep '^D-' "$run/generate.out" | sort -V | cut -f 3 > "$run/$pair.translated"
                    score+=", BLEU $(sacrebleu "$data/test_2016_flickr.${pair#*-}" -i "$run/$pair.translated" \
                        --force -b -w 2)" ;;
                esac
                mkdir -p "$out/$tasks/$name/$pair-$seed"
                ln -sf "../../$name-$seed/train.log" "$out/$tasks/$name/$pair-$seed/train.log"
                echo "$score" > "$out/$tasks/$name/$pair-$seed/score.txt"
                echo "$tasks $name seed $seed, $pair: $score"
            done
            rm "$run/"*.pt
            touch "$run/done"
        done
    done
done
mapfile -t table < <(printf '%s\n' "${table[@]}" | sort -u)
python "$root/examples/score_table.py" "$out" "${table[@]}"
python -m fairseq_tutel report "$run" --name "several tasks" --output "$out/report.html" --overwrite
