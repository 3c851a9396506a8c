"""Streams that others have dropped, perhaps with work to do.

CUDA gives the pointer of a stream that was destroyed to one that is made later, even while the first has work to do;
and CuPy's pool, which has memory by streams' pointers, then gives what that work uses to the new stream. So an object
that ends a stream lives until the stream's work is done.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import cupy

from ..arrays import LEGACY_STREAMS, CudaStream, is_capturing
from .driver import is_done

_PER_THREAD_STREAM = 2  # CuPy's pointer of each thread's default stream
_LOOKED_AT = 4  # from so many on those are looked for that are done

_lock = threading.RLock()  # a signal's handler, or the collector of cycles, may come between
_kept: dict[int, Any] = {}  # by id(): several objects may have one stream, with one of which it ends
_look_at = _LOOKED_AT

if hasattr(os, "register_at_fork"):
    # A child has no other thread that could release it, and needs it for what threads that are no longer there kept.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def keep_until_done(*streams: Any) -> None:
    """To be called for streams of CuPy's, of whatever kind, behind all that a thread has launched on them."""
    global _look_at
    ending = {id(stream): stream for stream in streams if _ends(stream)}
    if not ending:
        return
    done: list[Any] = []  # let go behind the lock: with an object others may go, whose finalizers may wait for anything
    with _lock:
        _kept.update(ending)
        if len(_kept) >= _look_at:
            done = [one for one in list(_kept.values()) if _has_no_work(one)]
            for one in done:
                _kept.pop(id(one), None)
            _look_at = max(_LOOKED_AT, 2 * len(_kept))


def _ends(stream: Any) -> bool:
    """Whether the stream may end with its object: not with a default stream's, nor with one over a bare pointer."""
    bare = isinstance(stream, getattr(cupy.cuda, "ExternalStream", ()))
    bare |= isinstance(_behind(stream), CudaStream)
    return not bare and stream.ptr not in (*LEGACY_STREAMS, _PER_THREAD_STREAM)


def _has_no_work(stream: Any) -> bool:
    if _is_closed(stream):
        return True
    try:
        return not is_capturing(stream) and is_done(stream.ptr)
    except RuntimeError:  # of a capture that failed: it must be ended first
        return False


def _is_closed(stream: Any) -> bool:
    """Whether another library's stream, which CuPy's object is of, was ended: then its pointer must not be asked."""
    other = _behind(stream)
    if other is None:
        return False
    try:
        return bool(other.__cuda_stream__()[1] != stream.ptr)
    except Exception:  # what cuda.core's streams raise then
        return True


def _behind(stream: Any) -> Any:
    """The object that CuPy's Stream.from_external() was given, if this one is of it."""
    return getattr(stream, "_foreign_stream_ref", None)
