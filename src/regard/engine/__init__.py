"""The same numbers, fast: masks lowered to PyTorch's fused kernels.

Next: engine/sdpa.py
"""
