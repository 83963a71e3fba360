"""The version, the only place that says it: the wheel's is read from here."""

__version__ = "0.1.0"
