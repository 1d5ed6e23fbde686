"""Print a line for each log record of a fairseq training run on standard input."""

import json
import re
import sys

RECORD = re.compile(r"\| (train_inner|valid) \| (\{.*\})")


def main() -> None:
    """Read standard input to the end; the script's argument is the number of updates."""
    for line in sys.stdin:
        found = RECORD.search(line)
        if found is None:
            continue
        record = json.loads(found[2])
        if found[1] == "valid":
            print(f"  validation: perplexity {record['valid_ppl']}", flush=True)
        else:
            print(
                f"  update {record['num_updates']} of {sys.argv[1]}: perplexity {record['ppl']}", flush=True
            )


if __name__ == "__main__":
    main()
