"""Runs live in a browser: a server that only reads run folders, and what it may do in them if it is allowed to."""
