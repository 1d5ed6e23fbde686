"""The command-line tools of `python -m fairseq_tutel TOOL`, each in a separate module."""
