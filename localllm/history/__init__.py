"""Saved conversations: SQLite with full-text search, exports, imports, and the prompts typed before.

A chat is a tree of messages. Every write is one transaction; what was saved survives a kill of the process. Knows
nothing of models, engines or screens. Imports nothing here: the interface paints before SQLite is there.
"""
