"""Talking to other machines: what the Python client and the export destinations share."""

from penstock.net.http import HttpAnswer, HttpClient

__all__ = ["HttpAnswer", "HttpClient"]
