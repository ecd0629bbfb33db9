"""Saved conversations: SQLite with full-text search, exports, imports, and the prompt history.

A chat is a tree of messages. Every write is one transaction, so saved data survives a kill of the process. Independent
of models, engines and screens. Nothing is imported here: the interface paints before SQLite is loaded.
"""
