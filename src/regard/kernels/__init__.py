"""Statistics of attention as two Triton kernels, for GPUs.

Next: run_kernels.py
"""
