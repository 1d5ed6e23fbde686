"""What `python -m fairseq_tutel TOOL` runs, a file each."""
