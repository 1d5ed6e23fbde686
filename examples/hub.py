"""Apply a trained model to lines of standard input.

python examples/hub.py CHECKPOINT [data=DATA_BIN] [moe_expert_store=on-demand] [option=value …] < lines.txt

A translation model translates each line, a language model continues it, and a masked or denoising model
fills in <mask>. For an image classifier, each line is the name of an image file. Instead of a file,
CHECKPOINT may be a --save-dir.
"""

import sys

import fairseq_tutel as ft


def main():
    """Print the model's result for every line of standard input."""
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    model = ft.from_checkpoint(sys.argv[1], **options)
    method = next(name for name in ("fill_mask", "classify", "translate") if hasattr(model, name))
    answer = getattr(model, method)  # A language model's `translate` continues a text.
    print(f"{method} on {model.device}", file=sys.stderr)
    for line in sys.stdin:
        try:
            print(answer(line.strip()), flush=True)
        except Exception as error:  # For example, a line is too long.
            print(flush=True)
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
