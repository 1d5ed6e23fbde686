"""Train, evaluate and compare a dense and a MoE language model.

The command `make demo` runs this script. The script writes `demo/result.json` and `demo/report.html`.
"""

import argparse
import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import corpus
import steps
import tools
from recipes import DENSE, MOE, UPDATES


def main() -> None:
    """Run all steps of the demo, and write the results."""
    parser = argparse.ArgumentParser(description="Compare a dense and a MoE language model.")
    parser.add_argument("--setup-seconds", type=int, help="what the set-up took, for the report")
    setup_seconds = parser.parse_args().setup_seconds

    started = monotonic()
    os.chdir(Path(__file__).parents[2])
    # fairseq would resume the checkpoints of an earlier run of the demo.
    shutil.rmtree(steps.OUT, ignore_errors=True)

    def begin(step: str) -> None:
        print(f"\n== {step} (after {(monotonic() - started) / 60:.0f} min)", flush=True)

    print("Seven steps, 4 minutes on two cores that nobody else uses, more on older ones.", flush=True)
    begin("1 of 7: a corpus of text and code, from this Python's own library")
    corpus.build(steps.CORPUS)
    begin("2 of 7: binarise it")
    steps.preprocess(corpus.SPLIT_CHARS)
    begin(f"3 of 7: train the dense model, {UPDATES} updates, about 90 seconds")
    dense_speed = steps.train(DENSE)
    begin(f"4 of 7: train the MoE model, {UPDATES} updates, about 90 seconds")
    moe_speed = steps.train(MOE)
    begin("5 of 7: evaluate both")
    dense_ppl, moe_ppl = steps.evaluate(DENSE), steps.evaluate(MOE)
    begin("6 of 7: let the MoE model write")
    steps.generate(MOE)
    begin("7 of 7: draw both trainings")
    page = tools.report([DENSE.name, MOE.name], steps.OUT)

    result = {
        "dense_ppl": dense_ppl,
        "moe_ppl": moe_ppl,
        "dense_tokens_per_second": dense_speed,
        "moe_tokens_per_second": moe_speed,
        "seconds": round(monotonic() - started, 1),
        "setup_seconds": setup_seconds,
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
            "fairseq": version("fairseq-fixed"),
            "fairseq_tutel": version("fairseq-tutel"),
        },
    }
    text = json.dumps(result, indent=2)
    (steps.OUT / "result.json").write_text(text + "\n", encoding="utf-8")
    print(f"\n{steps.OUT / 'result.json'}:\n{text}")
    print(f"\nHow the two trainings went: open {page} in a browser.")


if __name__ == "__main__":
    main()
