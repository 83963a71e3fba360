"""SGLang's path of what launch scripts of trainers import."""

from __future__ import annotations

from sglang.srt.utils.common import (
    assert_pkg_version as assert_pkg_version,
)
from sglang.srt.utils.common import (
    get_ip as get_ip,
)
from sglang.srt.utils.common import (
    get_open_port as get_open_port,
)
from sglang.srt.utils.common import (
    is_cuda as is_cuda,
)
from sglang.srt.utils.common import (
    is_port_available as is_port_available,
)
from sglang.srt.utils.common import (
    kill_process_tree as kill_process_tree,
)
from sglang.srt.utils.common import (
    set_prometheus_multiproc_dir as set_prometheus_multiproc_dir,
)
from sglang.srt.utils.common import (
    set_ulimit as set_ulimit,
)
from sglang.srt.utils.tensor_serializer import (
    MultiprocessingSerializer as MultiprocessingSerializer,
)
