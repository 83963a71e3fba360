"""Gives, under SGLang's path, the code that reserves and releases KV slots of requests, and the
audit of a release. They are in `srt/mem_cache/`: `kv_ledger.py` and `kv_audit.py`."""

from __future__ import annotations

from sglang.srt.mem_cache.kv_audit import (
    ReleaseAudit as ReleaseAudit,
)
from sglang.srt.mem_cache.kv_ledger import (
    KVLedger as KVLedger,
)
