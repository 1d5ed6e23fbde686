"""Apply a trained model to lines of standard input.

python examples/hub.py CHECKPOINT [data=DATA_BIN] [moe_expert_store=on-demand] [option=value …] < lines.txt

A translation model translates each line, a language model continues it, and a masked or denoising model
fills in <mask>. For an image classifier, each line is a file name. CHECKPOINT may be a --save-dir.
"""

import sys

import fairseq_tutel as ft


def main():
    """Print the result for every line."""
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    model = ft.from_checkpoint(sys.argv[1], **options)
    method = next(name for name in ("fill_mask", "classify", "translate") if hasattr(model, name))
    answer = getattr(model, method)  # a language model's `translate` continues the text
    print(f"{method} on {model.device}", file=sys.stderr)
    for line in sys.stdin:
        try:
            print(answer(line.strip()), flush=True)
        except Exception as error:  # an error of only this line, such as a text that is too long
            print(flush=True)
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
