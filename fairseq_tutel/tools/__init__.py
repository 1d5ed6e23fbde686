"""The command-line tools that `python -m fairseq_tutel TOOL` runs."""
