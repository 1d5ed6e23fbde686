"""Apply a trained model to lines of standard input.

python examples/hub.py CHECKPOINT [data=DATA_BIN] [moe_expert_store=on-demand] [option=value …] < lines.txt

A translation model translates the lines, a language model continues them, a masked or denoising model
fills in <mask>, and an image classifier opens them as file names. CHECKPOINT may be a --save-dir.
"""

import sys

import fairseq_tutel as ft


def main():
    """Print the result for every line."""
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    model = ft.from_checkpoint(sys.argv[1], **options)
    method = next(name for name in ("fill_mask", "classify", "translate") if hasattr(model, name))
    answer = getattr(model, method)  # of a language model, translate continues the text
    print(f"{method} on {model.device}", file=sys.stderr)
    for line in sys.stdin:
        try:
            print(answer(line.strip()), flush=True)
        except Exception as error:  # of this line alone, such as a text that is too long
            print(flush=True)
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
