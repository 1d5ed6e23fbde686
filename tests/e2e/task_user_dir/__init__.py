"""A user's --user-dir: this file loads the plugin; then fairseq imports the task from `tasks`."""

from fairseq_tutel.plugin import register

register()
