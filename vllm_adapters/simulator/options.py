"""What a simulated fleet is made of: the settings of `pointsman sim`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_adapters.simulator.engine import BLOCK_SIZE_TOKENS, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Engine
from vllm_adapters.simulator.exposition import DIALECTS
from vllm_adapters.simulator.hardware import H100_8B, HARDWARE, Hardware

_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class SimOptions:
    """`count` engines on the ports from `port` on (0: any free ports). Raises ValueError on settings that cannot run.

    `models`: names served, the first is the model's own. `speed`: how much faster than the hardware time passes.
    `kv_capacity_tokens`: None for what the hardware has. `record`: how many requests `/sim/requests` remembers.
    `max_batched_tokens`: of a step. `measured`: step times to use instead of those of the hardware named.
    `metrics`: of which engine they have the names. `stats_port`: they push their figures, the first one there, the
    others on the next ports (0: on any).
    """

    host: str = "127.0.0.1"
    port: int = 8001
    count: int = 1
    models: tuple[str, ...] = ("sim",)
    speed: float = 1.0
    hardware: str = H100_8B.name
    kv_capacity_tokens: int | None = None
    max_model_len: int = 131_072
    max_num_seqs: int = MAX_NUM_SEQS
    block_size: int = BLOCK_SIZE_TOKENS
    record: int = 0
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    measured: Hardware | None = None
    metrics: str = "vllm"
    stats_port: int | None = None

    def __post_init__(self) -> None:
        if self.hardware not in HARDWARE:
            raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, not {self.hardware!r}")
        if self.metrics not in DIALECTS:
            raise ValueError(f"metrics must be those of {', '.join(DIALECTS)}, not {self.metrics!r}")
        if not self.models or self.count < 1 or self.block_size < 1 or self.max_num_seqs < 1 or self.record < 0:
            raise ValueError("models, count, block_size and max_num_seqs must be at least 1, record at least 0")
        if not 0 <= self.port <= _LAST_PORT + 1 - self.count:
            raise ValueError(f"there is no port {self.port + self.count - 1}: the last one is {_LAST_PORT}")
        if not self.speed > 0:
            raise ValueError(f"speed must be more than 0, not {self.speed}")
        if self.max_model_len > self.capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the {self.capacity_tokens} tokens of KV cache"
            )

    @property
    def capacity_tokens(self) -> int:
        """KV cache of one engine, whole blocks only."""
        tokens = self.kv_capacity_tokens or self._profile.kv_capacity_tokens
        return tokens // self.block_size * self.block_size

    @property
    def _profile(self) -> Hardware:
        return self.measured or HARDWARE[self.hardware]

    def engine(self) -> Engine:
        """A new, empty engine of this kind."""
        return Engine(
            self._profile,
            kv_capacity_tokens=self.capacity_tokens,
            block_size_tokens=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
        )
