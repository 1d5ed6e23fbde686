"""Importing this folder, which is the --user-dir for fairseq, registers the plugin."""

from fairseq_tutel.plugin import register

register()
