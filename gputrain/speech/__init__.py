"""Prepared speech: transcripts, text rules, the store of waves and texts, and its batches."""
