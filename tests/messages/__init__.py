"""Payloads: encoding, schemas."""
