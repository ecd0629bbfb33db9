"""What all commands share: the program, its options, help, errors, console, progress and log."""
