"""`python -m fairseq_tutel user-dir`: print the directory to give fairseq as --user-dir."""

import argparse
import os

from fairseq_tutel import __version__


def main() -> None:
    """Run the tool that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_tutel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fairseq_tutel {__version__}")
    tools = parser.add_subparsers(dest="tool", required=True)
    tools.add_parser("user-dir", help="print the directory to give fairseq as --user-dir")
    parser.parse_args()
    print(os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    main()
