"""Torch models: backbone, value head, attention over packed sequences, the tiny model, snapshots."""
