"""The types of what commands print with --json, and the JSON schemas in localllm/schemas that are made of them.

`make schemas` writes the schemas again. Nothing here is imported while a command runs.
"""
