"""What holds for all tests."""

from __future__ import annotations

from target import TARGET, use_flags_as_defaults

use_flags_as_defaults(TARGET)
