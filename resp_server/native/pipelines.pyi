"""The types of `pipelines.pyx`, which has the docstrings."""

from typing import Any

from resp_server.native.client_fields import InputInterceptor

class PipelineFields: ...

class ReplyInterceptor(InputInterceptor):
    def __init__(self, pipeline: Any, epochs: Any) -> None: ...

def past_items(data: bytes, at: int, missing: int) -> tuple[int, int]: ...
