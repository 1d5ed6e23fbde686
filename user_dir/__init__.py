"""The directory to give fairseq as `--user-dir`."""

from fairseq_tutel.plugin import register

register()
