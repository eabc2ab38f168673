"""Outgoing connections of the Python client, the command line, Spark and routes."""

from penstock.net.http import HttpAnswer, HttpClient

__all__ = ["HttpAnswer", "HttpClient"]
