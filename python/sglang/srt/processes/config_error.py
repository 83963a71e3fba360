"""The error of flags that cannot be met."""

from __future__ import annotations


class ConfigError(ValueError):
    """A flag that cannot be met on this machine or with this model."""
