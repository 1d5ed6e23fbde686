"""A --user-dir that loads the plugin. fairseq then imports a custom task from its folder `tasks`."""

from fairseq_tutel.plugin import register

register()
