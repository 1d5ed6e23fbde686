"""A user's folder: the plugin first, then a task that fairseq imports from `tasks` by itself."""

from fairseq_tutel.plugin import register

register()
