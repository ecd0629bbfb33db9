"""Triton kernels for NVIDIA cards. Nothing here is imported, and Triton neither, before a layer on such a card asks."""
