"""
Capsules: frozen boundaries of any static-buffer program.

This package knows buffers and rows, not layers. ``pool`` holds the memory, ``lineage`` knows which
rows need copying, ``capsule`` is the object people name, ``store`` keeps the named ones under a
budget, ``codec`` and ``tiers`` put them on disk, ``fingerprint`` says who may restore what.
"""
