"""Triton's kernels in tests: compiled where there is a GPU, interpreted elsewhere; `conftest.py` has chosen."""

from typing import Any

import pytest
import torch

from headwater.transfer.device.xxh3 import interpreted

INTERPRETED = interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"  # where a cache must be for the kernels to reach it
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="torch sees no GPU, and TRITON_INTERPRET is not set"
)
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


def _mend_interpreter() -> None:
    """NumPy 2.4 makes no scalar of an array with one element, which Triton 3.6's interpreter asks for in `range`."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETED:
    _mend_interpreter()
