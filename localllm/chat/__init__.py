"""Renders messages to prompts, and splits streamed answers into content, reasoning and tool calls."""
