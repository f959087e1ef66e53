"""Checkpoints of the original programs to our parameters."""

from convert.hf import load_hf

__all__ = ["load_hf"]
