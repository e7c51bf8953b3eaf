"""Kernels for CPUs: Python compiled by numba, run by all of torch's OpenMP threads, each beside its
reference.
"""
