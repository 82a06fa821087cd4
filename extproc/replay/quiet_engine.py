"""The simulator's engine, able to pass over steps in which nothing happens: four of five while it decodes.

A quiet step gives every decoding request one more token and does nothing else: no chunk of a prompt, no admission, no
full block, no end. Many of them in a row are sums, so the replay takes them at once. Outcomes are the same to the last
digit, which a test holds it to.
"""

from __future__ import annotations

from vllm_adapters.simulator.engine import Engine


class QuietEngine(Engine):
    """An Engine that knows how long it will be quiet."""

    def quiet_steps(self) -> int:
        """How many of the coming steps are quiet, if nobody submits or aborts."""
        if self._prefilling or self._growing or self._leaving or not self._due or self._admits():
            return 0
        return max(0, self._due[0][0] - self._step - 1)

    def quiet_ends_s(self, steps: int, now_s: float, speed: float) -> list[float]:
        """When each of so many quiet steps ends, if the first starts now."""
        hardware, decodes, kv_tokens = self.hardware, self._decoding, self._decoding_kv_tokens
        fixed_s = hardware.duration_s(prefill_tokens=0, attention_tokens=0.0, decodes=decodes, kv_tokens=0)
        ends_s = []
        for _ in range(steps):
            now_s += (fixed_s + hardware.kv_read_s * kv_tokens) / speed
            ends_s.append(now_s)
            kv_tokens += decodes
        return ends_s

    def skip(self, steps: int) -> None:
        """Take so many quiet steps."""
        self._step += steps
        self._decoding_kv_tokens += steps * self._decoding
        self.generation_tokens_total += steps * self._decoding

    def _admits(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.max_num_seqs and not self._head_refused
