"""Shared by all commands: the program, its options, help, errors, console, progress and log."""
