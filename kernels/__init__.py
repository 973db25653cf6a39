"""Tensor code: Triton for GPUs, a compiled CPU path, and the PyTorch reference both are tested against."""
