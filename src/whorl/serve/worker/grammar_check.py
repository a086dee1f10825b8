"""Grammars of clients are compiled in a process that can be killed, before the engine's compiler gets them.

`{"type": "integer", "multipleOf": 1000003}` takes llguidance 10 s and 300 MB. Its limits of fuel do not cover such cases,
and a thread cannot be ended. So one process compiles each new grammar first, over single bytes in place of the model's
vocabulary, on which the cost does not depend. A grammar that passes is compiled again for the model, by the thread that
checked it: the compiler releases the interpreter's lock, so that neither the event loop nor the engine waits.
"""

from __future__ import annotations

import copy
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import psutil

from whorl.engine.request import Grammar
from whorl.engine.sampling.grammar import GrammarCompiler, compile_ahead
from whorl.errors import ConfigError, WhorlError
from whorl.machine.process import Channel, Child

COMPILE_SECONDS = 2.0
COMPILE_BYTES = 64 << 20
START_SECONDS = 60.0
KEPT_RESULTS = 4096
_ENTRY = "whorl.serve.worker.grammar_check:serve_checks"


class GrammarChecker:
    """Compiles grammars within limits. Used by one thread at a time; starts its process at the first grammar."""

    def __init__(self, seconds: float = COMPILE_SECONDS) -> None:
        self.seconds = seconds
        self._child: Child | None = None
        self._results: OrderedDict[bytes, WhorlError | None] = OrderedDict()  # by hash of the grammar

    def check(self, grammar: Grammar) -> None:
        """Return if the grammar can be compiled within the limits; takes at most about twice `seconds`.

        Raises:
            ConfigError: it is invalid, or takes too much time or memory.
        """
        key = sha256(grammar.model_dump_json().encode()).digest()
        if key in self._results:
            error = self._results[key]
        else:
            used = self._child is not None
            error, ended = self._compile_in_child(grammar)
            if ended and used:  # its memory may be that of earlier grammars
                error, _ = self._compile_in_child(grammar)
            self._results[key] = error
            if len(self._results) > KEPT_RESULTS:
                self._results.popitem(last=False)
        if error is not None:
            raise copy.copy(error)  # a kept one would collect the frames of every request that it refused

    def compile(self, compile_grammar: Callable[[Grammar], Any] | None, grammar: Grammar) -> Any:
        """Check a grammar, then compile it in this process; None without `compile_grammar`. Raises ConfigError."""
        self.check(grammar)
        return None if compile_grammar is None else compile_ahead(compile_grammar, grammar)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.channel.close()
            self._child = None

    def _compile_in_child(self, grammar: Grammar) -> tuple[WhorlError | None, bool]:
        """Return (error of the grammar, whether the process died in it)."""
        ended = False
        try:
            if self._child is None:
                self._child = Child(_ENTRY, name="grammars", nice=5, preload=(__name__,))
                if not self._child.channel.poll(START_SECONDS):
                    raise EOFError
                self._child.channel.recv()
            self._child.channel.send(grammar)
            if self._child.channel.poll(self.seconds):
                error: WhorlError | None = self._child.channel.recv()
                return error, False
            problem = f"compiling it takes more than {self.seconds:g} s"
        except (EOFError, OSError):
            ended, problem = True, f"compiling it takes more than {COMPILE_BYTES >> 20} MB"
        self.close()
        return ConfigError(f"the grammar is too complex: {problem}", expected="a simpler grammar"), ended


def serve_checks(channel: Channel) -> None:
    """Main function of the process: compiles the received grammars, and returns their errors."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the library reports on stderr that memory is short, and aborts
    compiler = GrammarCompiler([*(bytes([n]) for n in range(256)), b""], [256], cache_mb=0)
    used = _data_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if used:
        resource.setrlimit(resource.RLIMIT_DATA, (used + COMPILE_BYTES, used + COMPILE_BYTES))
    channel.send(None)
    while _data_bytes() <= used + COMPILE_BYTES // 2:  # else the next grammar gets a new process
        grammar, error = channel.recv(), None
        try:
            compiler.compile(grammar)
        except WhorlError as problem:
            error = problem
        except MemoryError:
            return
        channel.send(error)


def _data_bytes() -> int:
    """Return the private memory of this process as RLIMIT_DATA counts it; 0 where that limit has no effect."""
    size: Any = getattr(psutil.Process().memory_info(), "data", 0)
    return int(size)
