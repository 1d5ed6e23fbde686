"""A --user-dir that loads the plugin, and has a custom task in the folder `tasks`."""

from fairseq_tutel.plugin import register

register()
