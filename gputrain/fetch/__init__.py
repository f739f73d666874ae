"""Finds and downloads published starting points, without torch, and nothing that the user has not named."""
