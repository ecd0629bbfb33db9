"""The types of the documents that commands print with --json. The JSON schemas in localllm/schemas are made from them.

`make schemas` writes the schemas again. No command imports these modules.
"""
