"""What the thread that trains is doing, read from its Python stack by another thread.

This costs the training thread nothing, and it covers collectives of torch that a program calls
itself as well as those of shardhet.
"""

import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import shardhet.comm

MAX_FRAMES = 16
MAX_STACK_CHARACTERS = 4000

_OWN = str(Path(shardhet.comm.__file__).parent.parent)
_COMM = str(Path(shardhet.comm.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_OWN, _TORCH, sysconfig.get_paths()["stdlib"], "<")
# A thread that is blocked in a collective is in one of these.
_WAITING = (_COMM, f"{_TORCH}/distributed/distributed_c10d.py", f"{_TORCH}/distributed/c10d_")
# On the stack while code is compiled or tuned, and not while compiled code runs.
_COMPILING = (
    f"{_TORCH}/_dynamo/convert_frame.py",
    f"{_TORCH}/_inductor/compile_fx.py",
    f"{_TORCH}/_inductor/async_compile.py",
    f"{_TORCH}/_inductor/codecache.py",
)
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")
_TRITON_COMPILING = ("/triton/compiler/", "/triton/runtime/autotuner.py")


class Posture(NamedTuple):
    """What a thread is doing."""

    is_waiting: bool  # for other ranks, or for a device that may be waiting for them
    is_compiling: bool
    place: str  # file:line of the innermost frame outside of libraries
    is_debugged: bool = False  # it stands at a prompt of pdb, or of another debugger


NOWHERE = Posture(is_waiting=False, is_compiling=False, place="unknown")


def posture(thread_ids: frozenset[int]) -> Posture:
    """The posture of the training thread, which is one of these, or hands over between them."""
    found = [_posture(frame) for frame in _frames_of(thread_ids)]
    if not found:
        return NOWHERE
    # While autograd runs backward on another thread, the main one is inside of its call.
    for each in found:
        if each.is_waiting or each.is_compiling or each.is_debugged:
            return each
    return found[0]


def stack(thread_ids: frozenset[int]) -> str:
    """The innermost frames of these threads, as a traceback shows them."""
    parts = []
    for frame in _frames_of(thread_ids):
        lines = traceback.format_list(traceback.extract_stack(frame)[-MAX_FRAMES:])
        parts.append("".join(lines)[-MAX_STACK_CHARACTERS:])
    return "another thread:\n".join(parts)


def _frames_of(thread_ids: frozenset[int]) -> list[FrameType]:
    """The innermost frame of each of these threads, if it runs Python.

    A frame keeps its local variables alive, tensors too.  This thread's own frame would be part
    of a cycle with what is found here, and all frames would live until cycles are collected.
    """
    return [frame for key, frame in sys._current_frames().items() if key in thread_ids]


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or "site-packages" in filename


def _posture(frame: FrameType) -> Posture:
    """The posture of a thread whose innermost frame is ``frame``.

    It waits if the innermost frame that is not of a library is one that waits: what waits also
    reads files and looks at clocks, and a thread is likely to be seen in just such a call,
    because it lets other threads run there.
    """
    place, is_waiting, is_compiling, is_debugged = None, None, False, False
    walked: FrameType | None = frame
    while walked is not None:
        name = walked.f_code.co_filename
        is_compiling |= name.startswith(_COMPILING)
        is_compiling |= any(part in name for part in _TRITON_COMPILING)
        is_debugged |= any(part in name for part in _DEBUGGERS)
        if is_waiting is None and name.startswith(_WAITING):
            is_waiting = True
        if is_waiting is None and (name.startswith(_OWN) or not _is_library(name)):
            is_waiting = False
        if place is None and not _is_library(name):
            place = f"{name}:{walked.f_lineno}"
        walked = walked.f_back
    return Posture(
        is_waiting=bool(is_waiting),
        is_compiling=is_compiling,
        place=place or f"{frame.f_code.co_filename}:{frame.f_lineno}",
        is_debugged=is_debugged,
    )
