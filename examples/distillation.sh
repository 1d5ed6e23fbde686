#!/usr/bin/env bash
# Train a smaller student with and without its teacher, at equal steps and data, to measure DeepSpeed-MoE's
# staged distillation on the language model of language_model.sh.
#
#   examples/distillation.sh DATA_DIR [OUT]
#
# DATA_DIR is the folder for language_model.sh. The teacher is the 4-layer MoE model of that script. The student
# starts as the teacher without its second layer. It is trained without the teacher, with the teacher for the
# first half of the updates (staged), and with the teacher to the end (full). The script prints perplexities on
# the report half, and takes 18 minutes on one core.
# Environment: SEEDS (of students, "1 2 3"), UPDATES (of students, 300), START (updates of the teacher, 640), ALPHA (1).
set -euo pipefail

data=${1:?usage: examples/distillation.sh DATA_DIR [OUT]}
out=${2:-outputs/distillation}
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-300}
teacher="$out/moe-1/checkpoint_last.pt"

if [ ! -e "$teacher" ]; then
    MODELS=moe SEEDS=1 EXTRA="--max-update ${START:-640} --total-num-update ${START:-640}" \
        "$root/examples/language_model.sh" "$data" "$out" | sed "s/^moe/teacher/"
fi
python -m fairseq_tutel convert student "$teacher" --output "$out/student.pt" --overwrite \
    --drop-layers 1

distill="--criterion moe_distillation --distill-criterion moe_cross_entropy --distill-teacher $teacher
    --distill-alpha ${ALPHA:-1}"
declare -A cases=(
    [without]=""
    [staged]="$distill --distill-until $((updates / 2))"
    [full]="$distill"
)
for seed in ${SEEDS:-1 2 3}; do
    for name in without staged full; do
        mkdir -p "$out/$name"
        ln -sfn ../bin "$out/$name/bin"
        [ -e "$out/$name/moe-$seed/eval.txt" ] && continue
        EXTRA="--decoder-layers 3 --finetune-from-model $out/student.pt --lr 0.003 --warmup-updates 20
            --total-num-update $updates --max-update $updates ${cases[$name]}" \
            MODELS=moe SEEDS=$seed "$root/examples/language_model.sh" "$data" "$out/$name" | sed "s/^moe/$name/"
    done
done
python "$root/examples/distillation_table.py" "$out"
