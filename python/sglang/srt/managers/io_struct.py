"""SGLang's path of the messages; they are in `srt/messages/`."""

from __future__ import annotations

from sglang.srt.messages.control import (
    AbortReq as AbortReq,
)
from sglang.srt.messages.control import (
    ContinueGenerationReqInput as ContinueGenerationReqInput,
)
from sglang.srt.messages.control import (
    DestroyWeightsUpdateGroupReqInput as DestroyWeightsUpdateGroupReqInput,
)
from sglang.srt.messages.control import (
    FlushCacheReqInput as FlushCacheReqInput,
)
from sglang.srt.messages.control import (
    FlushCacheReqOutput as FlushCacheReqOutput,
)
from sglang.srt.messages.control import (
    InitWeightsUpdateGroupReqInput as InitWeightsUpdateGroupReqInput,
)
from sglang.srt.messages.control import (
    PauseGenerationReqInput as PauseGenerationReqInput,
)
from sglang.srt.messages.control import (
    UpdateWeightFromDiskReqInput as UpdateWeightFromDiskReqInput,
)
from sglang.srt.messages.control import (
    UpdateWeightsFromDistributedReqInput as UpdateWeightsFromDistributedReqInput,
)
from sglang.srt.messages.control import (
    UpdateWeightsFromTensorReqInput as UpdateWeightsFromTensorReqInput,
)
from sglang.srt.messages.control import (
    UpdateWeightVersionReqInput as UpdateWeightVersionReqInput,
)
from sglang.srt.messages.requests import (
    BatchStrOutput as BatchStrOutput,
)
from sglang.srt.messages.requests import (
    BatchTokenIDOutput as BatchTokenIDOutput,
)
from sglang.srt.messages.requests import (
    DetokenizeReqInput as DetokenizeReqInput,
)
from sglang.srt.messages.requests import (
    GenerateReqInput as GenerateReqInput,
)
from sglang.srt.messages.requests import (
    TokenizedGenerateReqInput as TokenizedGenerateReqInput,
)
from sglang.srt.messages.requests import (
    TokenizeReqInput as TokenizeReqInput,
)
