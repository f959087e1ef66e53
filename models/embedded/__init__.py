"""Small checkpoints trained in this repository, and how they were trained."""
