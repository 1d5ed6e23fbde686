"""Train, evaluate and compare a dense and a MoE Swin V2 on 5,000 digits of MNIST.

`make vision` runs this. It writes to `vision/`: numbers (result.json), curves (report.html), predictions
(predictions.csv), and the patches of each expert (experts.png).

In every second block of a stage, the MoE model has 8 experts in place of the FFN. Each expert is as wide as
the FFN, and a patch uses one expert. So FLOPs are equal, and the MoE model has many more parameters.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from time import monotonic

import digits
import tools
from tools import run

OUT = Path("vision")
DATA = OUT / "mnist_5k"
UPDATES = 1200
MODELS = {
    "dense": "--task image_classification --arch swin_v2 --criterion image_classification",
    "moe": """
        --task moe_image_classification --arch swin_v2_moe --criterion moe_image_classification
        --moe-expert-count 8 --moe-freq 2 --swin-expert-dropout 0""",
}
SHARED = f"""
    --swin-form v2 --swin-patch-size 4 --swin-window 7
    --swin-embed-dim 48 --swin-depths 2,2 --swin-heads 3,6 --swin-drop-path 0
    --image-crop-padding 1 --label-smoothing 0.1
    --optimizer moe_adam --adam-betas '(0.9, 0.98)' --weight-decay 0.05 --clip-norm 3
    --lr 0.004 --lr-scheduler polynomial_decay --warmup-updates 50
    --total-num-update {UPDATES} --max-update {UPDATES} --batch-size 64 --seed 1 --num-workers 0
    --validate-interval 4 --no-epoch-checkpoints --log-format json --log-interval 50
"""
PROGRESS = (
    r'train_inner .*?"(accuracy)": "(.+?)".*?"(wps)": "(.+?)".*?"(num_updates)": "(.+?)"'
    r'|"(valid_accuracy)": "(.+?)"'
)


def main() -> None:
    """Run all the steps and write the result."""
    started = monotonic()
    os.chdir(Path(__file__).parents[2])
    for name in MODELS:  # fairseq would resume the checkpoints of an earlier run
        shutil.rmtree(OUT / name, ignore_errors=True)

    def begin(step: str) -> None:
        print(f"\n== {step} (after {(monotonic() - started) / 60:.0f} min)", flush=True)

    begin("1 of 4: 5,000 digits, from a package")
    OUT.mkdir(exist_ok=True)
    digits.build(OUT)
    result = {}
    for number, name in enumerate(MODELS, start=2):
        begin(f"{number} of 4: train and evaluate {name}, {UPDATES} updates")
        result[f"{name}_images_per_second"] = train(name)
        result[f"{name}_test_accuracy"] = accuracy(name)
    begin("4 of 4: predict with the MoE model, and draw which patches go to which expert")
    draw("moe")
    page = tools.report(list(MODELS), OUT)

    result["seconds"] = round(monotonic() - started, 1)
    text = json.dumps(result, indent=2)
    (OUT / "result.json").write_text(text + "\n", encoding="utf-8")
    print(f"\n{OUT / 'result.json'}:\n{text}")
    print(f"\nLook at {OUT / 'predictions.csv'}, {OUT / 'experts.png'} and {page}.")


def train(name: str) -> float:
    """Train a model; return its speed in images per second."""
    words = [str(DATA), "--user-dir", "user_dir", "--cpu", *shlex.split(MODELS[name] + SHARED)]
    return tools.train(name, words, OUT, PROGRESS)


def accuracy(name: str) -> float:
    """Return a trained model's accuracy on the test split, in percent."""
    task = shlex.split(MODELS[name])[:2]
    words = [str(DATA), "--user-dir", "user_dir", *task, "--path", _checkpoint(name), "--cpu"]
    words += ["--valid-subset", "test", "--batch-size", "100", "--log-format", "simple"]
    shown = r"valid on .* (accuracy) ([\d.]+)"
    output = run("fairseq-validate", words, OUT / f"validate-{name}.log", show=shown)
    return float(re.findall(shown, output)[-1][1])


def draw(name: str) -> None:
    """Write a trained model's predictions, and draw its experts."""
    words = ["-m", "fairseq_tutel", "predict", _checkpoint(name), str(DATA), "--split", "test"]
    words += ["--output", str(OUT / "predictions.csv"), "--overwrite"]
    run("python", words, OUT / "predict.log", show=r"(.*)")
    words = ["examples/vision_experts.py", _checkpoint(name), str(DATA), str(OUT / "experts.png")]
    run("python", words, OUT / "experts.log", show=r"(.*patches of each expert.*)")


def _checkpoint(name: str) -> str:
    return str(OUT / name / "checkpoint_last.pt")


if __name__ == "__main__":
    main()
