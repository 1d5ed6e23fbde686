#!/usr/bin/env bash
# Compare further training of a dense translation model with upcycling it, at equal active FLOPs, steps and data.
#
#   examples/upcycling.sh DATA_DIR [OUT]
#
# DATA_DIR is the folder for translation.sh. Both runs start from the dense model of that script. Each layer of the
# upcycled model has 8 experts that are halves of its FFN. A token uses two experts, so FLOPs and the first output are
# equal. Environment: START (updates of the dense model, 200), UPDATES (further updates, 250), SEEDS (of these, "1 2").
set -euo pipefail

data=${1:?usage: examples/upcycling.sh DATA_DIR [OUT]}
out=${2:-outputs/upcycling}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-250}

MODELS=dense SEEDS=1 EXTRA="--max-update ${START:-200}" "$root/examples/translation.sh" "$data" "$out"
declare -A start=([dense]="$out/dense-1/checkpoint_last.pt" [moe]="$out/upcycled.pt")
python -m fairseq_tutel convert upcycle "${start[dense]}" --output "${start[moe]}" --overwrite \
    --moe-freq 1 --moe-expert-count 8 --moe-top-k 2 --moe-expert-ffn-dim 256

for name in dense moe; do
    mkdir -p "$out/$name"
    ln -sfn ../bin "$out/$name/bin"
    fairseq-validate "$out/bin" --user-dir "$root/user_dir" --path "${start[$name]}" --max-tokens 2048 \
        --task "$([ "$name" = moe ] && echo moe_)translation" 2>&1 | grep -o "valid on .* ppl [0-9.]*" | tail -n 1
    EXTRA="--finetune-from-model $(realpath "${start[$name]}") --lr 0.003 --warmup-updates 20
        --total-num-update $updates --max-update $updates" \
        MODELS=$name SEEDS="${SEEDS:-1 2}" "$root/examples/translation.sh" "$data" "$out/$name"
done
