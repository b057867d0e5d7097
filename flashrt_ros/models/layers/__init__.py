"""Residual blocks shared by families; each lists its weights, its state and how it runs."""
