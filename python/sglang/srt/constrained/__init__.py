"""Grammars: compiled and asked in processes of their own, so that none can stop a server."""
