"""What a step costs on the hardware we model, and how many tokens of KV cache it has.

Roofline figures, not measurements: good for comparing routing policies, not for sizing a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Hardware:
    """One model on one kind of GPU. All times in seconds.

    `step_s`: fixed cost of a step. `weights_s`: reading the weights once, the floor of every step's arithmetic.
    `token_s`: arithmetic per token, prefilled or decoded. `attention_s`: per prefilled token and token before it.
    `sequence_s`: per decoding sequence. `kv_read_s`: per token of KV cache that decoding reads.
    """

    name: str
    step_s: float
    weights_s: float
    token_s: float
    attention_s: float
    sequence_s: float
    kv_read_s: float
    kv_capacity_tokens: int

    def duration_s(self, *, prefill_tokens: int, attention_tokens: float, decodes: int, kv_tokens: int) -> float:
        """Duration of one step. `attention_tokens`: sum over chunks of n * (c + n/2), n tokens after c others."""
        return (
            self.step_s
            + max(self.weights_s, self.token_s * (prefill_tokens + decodes))
            + self.attention_s * attention_tokens
            + self.sequence_s * decodes
            + self.kv_read_s * kv_tokens
        )


# Ours, from data sheets: weights at 80 % of the memory's bandwidth (16 GB over 3.35 TB/s on an H100), 2 flops per
# parameter and token at about 40 % of dense bf16 peak, 131 kB of KV cache per token of an 8B model.
H100_8B = Hardware("8b-h100", 1.5e-3, 6.0e-3, 40e-6, 1.3e-9, 15e-6, 4.9e-8, 440_000)
H100X4_70B = Hardware("70b-4xh100", 4.0e-3, 13.0e-3, 80e-6, 1.6e-9, 25e-6, 3.0e-8, 425_000)
L40S_8B = Hardware("8b-l40s", 2.0e-3, 23.0e-3, 89e-6, 3.0e-9, 25e-6, 1.9e-7, 190_000)

HARDWARE = MappingProxyType({hardware.name: hardware for hardware in (H100_8B, H100X4_70B, L40S_8B)})
"""The profiles by name."""
