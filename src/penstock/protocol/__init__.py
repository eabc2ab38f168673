"""Formats, limits and names that broker and clients share. Imports nothing of the broker."""
