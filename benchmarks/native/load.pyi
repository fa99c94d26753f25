"""The types of `load.pyx`, which has the docstrings."""

from collections.abc import Sequence

class LoadError(Exception): ...

def send_all(
    descriptors: Sequence[int],
    request: bytes,
    numbers_at: Sequence[int],
    pipeline: int,
    requests: int,
    key_range: int,
    seed: int,
    replies: int = 1,
    takes_errors: bool = False,
) -> tuple[int, float, int]: ...
