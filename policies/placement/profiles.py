"""What a model on a piece of hardware costs: the figures that turn tokens into seconds.

A profile is a prior. The ledger learns from it (see ledger.py); what was learned can be told as a profile again, and
so carried over to another fleet or a restart. Not here: the simulator's hardware (vllm_adapters), which knows more.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

Amount = Annotated[float, Ge(1e-3), Le(1e9)]
Small = Annotated[float, Ge(0), Le(1e3)]
"""Bounds that no hardware comes near: an endless figure makes every cost equal, or no number at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One model on one kind of hardware.

    `prefill_tokens_per_s`: of short prompts; longer ones cost more by `attention_per_token`: a token after c others
    costs 1 + attention_per_token * c. `request_tokens`: fixed cost of a request, as prefilled tokens.
    `sequence_s`, `kv_token_s`: what each running request and each token of its KV cache add to everybody's step.
    `max_num_seqs`: requests in the engine's batch at most. Until they are learned: `output_tokens`, the length of an
    answer, and `decode_tokens_per_s`, how fast one answer is written where the engine is busy.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    prefill_tokens_per_s: Amount = 25_000.0
    attention_per_token: Small = 3.25e-5
    request_tokens: Annotated[float, Ge(0), Le(1e6)] = 256.0
    sequence_s: Small = 15e-6
    kv_token_s: Small = 4.9e-8
    max_num_seqs: Annotated[int, Ge(1), Le(1_000_000)] = 256
    output_tokens: Amount = 300.0
    decode_tokens_per_s: Amount = 50.0

    def work(self, prompt_tokens: Any, uncached_tokens: Any) -> Any:  # noqa: ANN401 - a number or an array of them
        """Prefill work in tokens of a short prompt: `uncached_tokens` at the end of `prompt_tokens`, and the request.

        The attention of token i costs in proportion to the i tokens before it; this is the sum over the uncached ones.
        """
        last_token = 1.0 + self.attention_per_token * prompt_tokens
        return uncached_tokens * (last_token - 0.5 * self.attention_per_token * uncached_tokens) + self.request_tokens


# Rooflines, not measurements (see the simulator's hardware page): a token's arithmetic is 40 us, 80 us and 89 us,
# attention 1.3, 1.6 and 3.0 ns per token and token before it. Decode rates are those of a full batch among prefills,
# about a third of an idle engine's.
HARDWARE = MappingProxyType(
    {
        "8b-h100": Profile(),
        "70b-4xh100": Profile(
            prefill_tokens_per_s=12_500.0,
            attention_per_token=2e-5,
            sequence_s=25e-6,
            kv_token_s=3e-8,
            decode_tokens_per_s=25.0,
        ),
        "8b-l40s": Profile(
            prefill_tokens_per_s=11_200.0,
            attention_per_token=3.4e-5,
            sequence_s=25e-6,
            kv_token_s=1.9e-7,
            decode_tokens_per_s=15.0,
        ),
    }
)
"""Priors by the name a pool's `hardware` uses."""
