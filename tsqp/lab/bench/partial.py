"""What has been measured of one policy so far."""

from __future__ import annotations

from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import Answer, Finished, Measured
from tsqp.lab.bench.model import Case, Generation, PolicyRun, Timeline


class Partial:
    """A policy's run as its answers come in.

    `gpu_peak_bytes`: of its services, set by the process that started them; None: not known.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cases: list[Case] = []
        self._timelines: list[Timeline] = []
        self._generation: Generation | None = None
        self._finished: Finished | None = None
        self.gpu_peak_bytes: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything was measured."""
        return bool(self._cases or self._generation)

    def take(self, answer: Answer) -> None:
        """Keep what an answer says."""
        if isinstance(answer, Finished):
            self._finished = answer
        elif isinstance(answer, Measured):
            self._cases += [answer.case] if answer.case else []
            self._timelines += [answer.timeline] if answer.timeline else []
            self._generation = answer.generation or self._generation

    def run(self) -> PolicyRun:
        """Return what there is; without a last answer, 0 for what only that says."""
        finished = self._finished
        return PolicyRun(
            policy=self._policy.name,
            summary=self._policy.summary,
            leakage_summary=self._policy.leakage_summary(),
            cases=tuple(self._cases),
            generation=self._generation,
            timelines=tuple(self._timelines),
            tee_peak_bytes=finished.peak_bytes if finished else 0,
            gpu_peak_bytes=self.gpu_peak_bytes,
            kv_bytes=finished.kv_bytes if finished else 0,
            vocabulary_bytes=finished.vocabulary_bytes if finished else 0,
            pads=finished.pads if finished else None,
        )
