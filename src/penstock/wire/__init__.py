"""Protocols as thin adapters: decode, call, encode. No logic lives here."""
