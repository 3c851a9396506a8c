"""Streams that others have dropped, perhaps with work to do.

CUDA gives the pointer of a stream that was destroyed to one that is made later, even while the first has work to do;
and CuPy's pool, which has memory by streams' pointers, then gives what that work uses to the new stream. So an object
that ends a stream lives until the stream's work is done.
"""

from __future__ import annotations

import threading
from typing import Any

import cupy

from ..arrays import CudaStream
from .driver import is_done

_DEFAULT_STREAMS = (0, 1, 2)  # CuPy's null stream, the legacy one, each thread's
_LOOKED_AT = 16  # from so many on those are looked for that are done

_lock = threading.RLock()  # a signal's handler, or the collector of cycles, may come between
_kept: dict[int, Any] = {}  # by their pointers
_look_at = _LOOKED_AT


def keep_until_done(stream: Any) -> None:
    """To be called for a stream of CuPy's, of whatever kind, behind all that a thread has launched on it."""
    global _look_at
    if not _ends(stream):
        return
    with _lock:
        _kept[stream.ptr] = stream
        if len(_kept) >= _look_at:
            for pointer, one in list(_kept.items()):
                if _has_no_work(one):
                    _kept.pop(pointer, None)
            _look_at = max(_LOOKED_AT, 2 * len(_kept))


def _ends(stream: Any) -> bool:
    """Whether the stream may end with its object: not with a default stream's, nor with one over a bare pointer."""
    bare = isinstance(stream, getattr(cupy.cuda, "ExternalStream", ()))
    bare |= isinstance(getattr(stream, "_foreign_stream_ref", None), CudaStream)
    return not bare and stream.ptr not in _DEFAULT_STREAMS


def _has_no_work(stream: Any) -> bool:
    try:
        return not stream.is_capturing() and is_done(stream.ptr)
    except RuntimeError:  # of a capture that failed: it must be ended first
        return False
