"""Kernels: the loops that compute, one package a language. No autograd, no dispatch, no validation."""
