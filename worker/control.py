"""Control: is it the row that cannot be computed, or the engine that computes nothing any more?

Owns one short request that the engine is known to answer, and the ends of jobs that wait for what becomes of it.
Knows no thread and no SQL. Invariant: no job fails by what the model computed unless the control succeeded after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from kvq.engine.errors import EngineError
from kvq.engine.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from kvq.engine.engine import Engine

_NUM_TOKENS = 8
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, seed=0)

Ended = tuple[str, list[RequestOutput]]


class Control:
    """The doubts about one engine; used on its thread."""

    def __init__(self) -> None:
        self.request_id = f"control-{uuid4().hex}"
        self._prompt: Sequence[int] = (0,)
        self._held: list[Ended] = []
        self._asked: list[Ended] = []

    def note_good(self, prompt: Sequence[int]) -> None:
        """This prompt was computed, and so can be its beginning."""
        self._prompt = prompt[:_NUM_TOKENS]

    def hold(self, ended: Ended) -> None:
        """These outputs of a job say that it could not be computed."""
        self._held.append(ended)

    def ask(self, engine: Engine) -> None:
        """Have the control computed if anybody waits for it, and it is not under way."""
        if self._held and not self._asked:
            engine.add_request(self.request_id, self._prompt, _PARAMS)
            self._asked, self._held = self._held, []

    def answered(self, output: RequestOutput) -> list[Ended]:
        """The jobs that failed by themselves, since the control did not.

        Raises:
            EngineError: it failed as they did: the engine, its weights or its device are at fault.
        """
        if output.error is not None:
            raise EngineError(
                f"the engine computes no usable numbers for any prompt ({output.error}): its weights or its device are "
                f"damaged, or the model overflows in this dtype"
            )
        failed, self._asked = self._asked, []
        return failed
