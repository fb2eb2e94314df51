"""Proves that a laid-out model computes what one process would."""
