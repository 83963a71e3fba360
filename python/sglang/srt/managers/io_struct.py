"""SGLang's path of messages and bodies; they are in `srt/messages/`, `srt/frontend/` and
`srt/control/bodies.py`."""

from __future__ import annotations

from sglang.srt.control.bodies import (
    DestroyWeightsUpdateGroupReqInput as DestroyWeightsUpdateGroupReqInput,
)
from sglang.srt.control.bodies import (
    InitWeightsUpdateGroupReqInput as InitWeightsUpdateGroupReqInput,
)
from sglang.srt.control.bodies import (
    UpdateWeightFromDiskReqInput as UpdateWeightFromDiskReqInput,
)
from sglang.srt.control.bodies import (
    UpdateWeightsFromDistributedReqInput as UpdateWeightsFromDistributedReqInput,
)
from sglang.srt.control.bodies import (
    UpdateWeightsFromTensorReqInput as UpdateWeightsFromTensorReqInput,
)
from sglang.srt.control.bodies import (
    UpdateWeightVersionReqInput as UpdateWeightVersionReqInput,
)
from sglang.srt.control.pause_bodies import (
    ContinueGenerationReqInput as ContinueGenerationReqInput,
)
from sglang.srt.control.pause_bodies import (
    PauseGenerationReqInput as PauseGenerationReqInput,
)
from sglang.srt.control.pause_bodies import (
    ReleaseMemoryOccupationReqInput as ReleaseMemoryOccupationReqInput,
)
from sglang.srt.control.pause_bodies import (
    ResumeMemoryOccupationReqInput as ResumeMemoryOccupationReqInput,
)
from sglang.srt.frontend.generate_body import (
    GenerateReqInput as GenerateReqInput,
)
from sglang.srt.frontend.tokenizer_bodies import (
    DetokenizeReqInput as DetokenizeReqInput,
)
from sglang.srt.frontend.tokenizer_bodies import (
    TokenizeReqInput as TokenizeReqInput,
)
from sglang.srt.messages.control import (
    AbortReq as AbortReq,
)
from sglang.srt.messages.control import (
    FlushCacheReqInput as FlushCacheReqInput,
)
from sglang.srt.messages.control import (
    FlushCacheReqOutput as FlushCacheReqOutput,
)
from sglang.srt.messages.requests import (
    BatchStrOutput as BatchStrOutput,
)
from sglang.srt.messages.requests import (
    BatchTokenIDOutput as BatchTokenIDOutput,
)
from sglang.srt.messages.requests import (
    TokenizedGenerateReqInput as TokenizedGenerateReqInput,
)
