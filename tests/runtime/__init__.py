"""Connections, loops, the listener."""
