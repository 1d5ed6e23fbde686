#!/usr/bin/env bash
# Compare dense and MoE Swin V2 on 5,000 digits of MNIST, with equal active FLOPs, steps and data.
#
#   examples/vision.sh [DATA] [OUT]
#
# DATA is the folder that `make vision-data` writes (vision/mnist_5k). Compares dense and MoE; linear and
# cosine gates; training with and without batch-prioritized routing (bpr), each evaluated with both and with
# decreasing capacity. Skips results that OUT has, resumes interrupted runs, and prints tables at the end.
# Environment: SEEDS (default "1 2 3"), CASES (all), UPDATES (500), OMP_NUM_THREADS (all cores).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
data=${1:-$root/vision/mnist_5k}
out=${2:-outputs/vision}
export PATH="$root/.venv/bin:$PATH"
updates=${UPDATES:-500}

# The MoE model has 8 experts in every second block of a stage. Each is as wide as the FFN; a patch uses one expert.
# Training uses capacity factor 1.25, load and importance losses, and gate noise.
moe="--task moe_image_classification --arch swin_v2_moe --criterion moe_image_classification
    --moe-expert-count 8 --moe-freq 2 --swin-expert-dropout 0"
declare -A case=(
    [dense]="--task image_classification --arch swin_v2 --criterion image_classification"
    [moe]="$moe"
    [cosine]="$moe --moe-gate-type cosine"
    [position]="$moe --moe-drop-policy position"
)
shared="--user-dir $root/user_dir --cpu --swin-form v2 --swin-patch-size 4 --swin-window 7
    --swin-embed-dim 48 --swin-depths 2,2 --swin-heads 3,6 --swin-drop-path 0
    --image-crop-padding 1 --label-smoothing 0.1
    --optimizer moe_adam --adam-betas (0.9,0.98) --weight-decay 0.05 --clip-norm 3
    --lr 0.004 --lr-scheduler polynomial_decay --warmup-updates 50
    --total-num-update $updates --max-update $updates --batch-size 64 --num-workers 0
    --disable-validation --no-epoch-checkpoints --log-format json --log-interval 50"

for seed in ${SEEDS:-1 2 3}; do
    for name in ${CASES:-dense moe cosine position}; do
        run="$out/$name-$seed"
        [ -e "$run/done" ] && continue
        mkdir -p "$run"
        # shellcheck disable=SC2086 # the flags are words
        fairseq-train "$data" ${case[$name]} $shared --seed "$seed" --save-dir "$run" \
            --log-file "$run/train.log" > "$run/output.txt" 2>&1
        touch "$run/done"
        echo "$name seed $seed: trained"
    done
done
python "$root/examples/vision_table.py" "$data" "$out"
