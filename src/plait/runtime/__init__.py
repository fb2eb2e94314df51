"""Carries out what design/ decided: tensors and processes from here on."""
