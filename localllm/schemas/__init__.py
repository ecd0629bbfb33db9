"""JSON schemas of the `--json` outputs."""
