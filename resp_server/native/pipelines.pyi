"""The types of `pipelines.pyx`, which has the docstrings."""

from typing import Any

from resp_server.native.core import InputInterceptor

class PipelineFields: ...

class ReplyInterceptor(InputInterceptor):
    def __init__(self, pipeline: Any, epochs: Any) -> None: ...
