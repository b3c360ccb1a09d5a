"""What a disk may hold after a power cut: only what was flushed, whatever of the rest happened to get there.

Notable:
- Contents of a file are those of its last fsync, empty without one. Entries of a folder are those of its last fsync or
  those of now: the kernel may have written them on its own. The top folder and the others decide separately, since a
  rename and a deletion below it may reach the disk in either order.
- Folders and files are known by inode, held open so that no inode is used twice.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tree = dict[str, "Tree | bytes"]
_CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Disk:
    """Watches the calls of this process and hands every state that a power cut could leave to `check`."""

    def __init__(self, root: Path, check: Callable[[Path], None], states: Path) -> None:
        """Begin with everything below `root` flushed.

        Args:
            root: The folder whose fate is followed.
            check: Called with a copy of each new state.
            states: Where the copies are made.
        """
        self._root, self._check, self._states = root, check, states
        self._handles: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self._seen: set[str] = set()
        self._num_states = 0
        self._lock = threading.RLock()
        self._busy = False
        for folder, _, names in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in names)):
                self._flushed(os.open(path, os.O_RDONLY))

    @property
    def num_states(self) -> int:
        """States checked so far."""
        return self._num_states

    def promised(self) -> None:
        """More is promised from here on: check what the disk may hold now, even where it was checked before."""
        self._seen.clear()
        self.cut()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Look before and after every call that changes what a power cut could leave."""
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def cut(self) -> None:
        """Check every state that a power cut could leave now."""
        for top_now, below_now in itertools.product((False, True), repeat=2):
            tree = self._tree(self._handles[os.stat(self._root).st_ino], top_now, below_now)
            if repr(tree) not in self._seen:
                self._seen.add(repr(tree))
                self._num_states += 1
                copy = self._states / str(self._num_states)
                _write(tree, copy)
                self._check(copy)

    def close(self) -> None:
        """Let go of all files."""
        for handle in self._handles.values():
            os.close(handle)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._busy:  # a call of `check` or of ours
                    return call(*args, **kwargs)
                self._busy = True
                try:
                    self.cut()
                    result = call(*args, **kwargs)
                    if name == "fsync":
                        self._flushed(os.dup(args[0]))
                    self.cut()
                    return result
                finally:
                    self._busy = False

        return watched

    def _flushed(self, handle: int) -> None:
        inode = os.fstat(handle).st_ino
        held = self._handles.setdefault(inode, handle)
        if held != handle:
            os.close(handle)
        path = Path(f"/proc/self/fd/{held}")
        if path.is_dir():
            self._entries[inode] = _entries_now(held)
        else:
            self._contents[inode] = path.read_bytes()

    def _tree(self, folder: int, now: bool, below_now: bool) -> Tree:
        inode = os.fstat(folder).st_ino
        tree: Tree = {}
        for name, (child, is_dir) in sorted((_entries_now(folder) if now else self._entries.get(inode, {})).items()):
            if not is_dir:
                tree[name] = self._contents.get(child, b"")
            elif child in self._handles:
                tree[name] = self._tree(self._handles[child], below_now, below_now)
            elif now and below_now:
                handle = os.open(name, os.O_RDONLY, dir_fd=folder)
                tree[name] = self._tree(handle, below_now, below_now)
                os.close(handle)
            else:
                tree[name] = {}
        return tree


def _entries_now(folder: int) -> dict[str, tuple[int, bool]]:
    """Inode, and whether it is a folder, by name."""
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries}


def _write(tree: Tree, target: Path) -> None:
    target.mkdir(parents=True)
    for name, item in tree.items():
        if isinstance(item, dict):
            _write(item, target / name)
        else:
            (target / name).write_bytes(item)
