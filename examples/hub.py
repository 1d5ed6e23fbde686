"""A trained model in Python: what it makes of the lines that come in.

python examples/hub.py CHECKPOINT [data=DATA_BIN] [moe_expert_store=on-demand] [option=value …] < lines.txt

A translation model translates them, a language model goes on with them, a masked or denoising one fills in
their <mask>, a classifier of images opens the files that they name. CHECKPOINT may be a --save-dir.
"""

import sys

import fairseq_tutel as ft


def main():
    """Print an answer to every line."""
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    model = ft.from_checkpoint(sys.argv[1], **options)
    print(f"{model.kind} on {model.device}; it offers {model.offers}", file=sys.stderr)
    answer = getattr(model, model.offers.split()[0].strip(","))
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)


if __name__ == "__main__":
    main()
