"""Typer commands, one module per group; heavy imports stand inside the commands."""
