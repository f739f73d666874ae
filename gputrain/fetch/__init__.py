"""Finds and downloads published starting points: short names, names on the Hugging Face Hub, and other addresses.

Nothing here imports torch, and nothing is downloaded that the user has not named.
"""
