"""What an option is; the tables of options stand beside what they configure."""
