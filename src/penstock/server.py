"""Puts the parts of one broker process together, and starts and stops them in order."""
