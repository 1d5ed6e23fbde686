"""Train a sentencepiece BPE on text, or split text into BPE pieces for fairseq-preprocess."""

import argparse
import sys

import sentencepiece


def main() -> None:
    """Run the step (train or split) that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    learn = steps.add_parser("learn", help="learn MODEL.model from text files")
    learn.add_argument("model", help="where to write, without the suffix")
    learn.add_argument("files", nargs="+", help="text to learn from")
    learn.add_argument("--vocab-size", type=int, default=4000, help="in pieces (default: 4000)")
    apply = steps.add_parser("apply", help="cut standard input into pieces")
    apply.add_argument("model", help="the file that `learn` wrote, with its suffix")
    arguments = parser.parse_args()
    if arguments.step == "learn":
        sentencepiece.SentencePieceTrainer.train(
            input=arguments.files,
            model_prefix=arguments.model,
            model_type="bpe",
            vocab_size=arguments.vocab_size,
            character_coverage=1.0,
            # WikiText has <unk> for rare words, which is also a symbol of fairseq's dictionaries.
            unk_piece="<unknown>",
            user_defined_symbols=["<unk>"],
            minloglevel=1,
        )
        return
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=arguments.model)
    for line in sys.stdin:
        print(" ".join(tokenizer.encode(line.rstrip("\n"), out_type=str)))


if __name__ == "__main__":
    main()
