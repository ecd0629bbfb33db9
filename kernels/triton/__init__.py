"""Triton kernels for GPUs. These modules, and Triton itself, are imported only when a layer on a GPU needs them."""
