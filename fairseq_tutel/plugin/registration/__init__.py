"""What an import of the plugin does: options, registered classes, wrapped fairseq functions, errors."""
