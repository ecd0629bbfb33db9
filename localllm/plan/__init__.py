"""Execution planning: from model facts and machine facts to a device, formats and sizes, with every byte counted."""
