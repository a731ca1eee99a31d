"""Which part of a model a rank of tensor parallelism holds. No torch here.

Queries, keys, values, gate and up are split by rows (heads, inner dimension): each rank computes
its own, whole. The output and down projections are split by columns: each rank's product is one
term of the sum that all ranks form. The head is split by rows of the vocabulary, padded with zeros
to a multiple of the ranks. Embedding and norms are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swiftapex.core.errors import ConfigError
from swiftapex.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size`. The slices are of the whole model's dimensions."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """It adds what must enter a sum once: biases of the layers split by columns."""
        return self.rank == 0

    def config(self, config: ModelConfig) -> ModelConfig:
        """The part as a model of its own: its heads and its inner dimension. ConfigError where the
        model does not divide by `size`."""
        check_divides(config, self.size)
        return replace(
            config,
            num_q_heads=config.num_q_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def q_rows(self, config: ModelConfig) -> slice:
        """Of the query projection."""
        return self._part(config.num_q_heads * config.head_dim)

    def kv_rows(self, config: ModelConfig) -> slice:
        """Of the key and of the value projection. With fewer heads than ranks, neighbours hold the
        same head."""
        if config.num_kv_heads >= self.size:
            return self._part(config.num_kv_heads * config.head_dim)
        head = self.rank * config.num_kv_heads // self.size
        return slice(head * config.head_dim, (head + 1) * config.head_dim)

    def inner_rows(self, config: ModelConfig) -> slice:
        """Of the gate and of the up projection: columns of the down projection."""
        return self._part(config.intermediate_size)

    def vocab_rows(self, config: ModelConfig) -> slice:
        """Of the head. May reach beyond the vocabulary: those rows are zeros."""
        return self._part(self.padded_vocab(config))

    def padded_vocab(self, config: ModelConfig) -> int:
        return -(-config.vocab_size // self.size) * self.size

    def _part(self, whole: int) -> slice:
        part = whole // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


WHOLE = Shard()


def check_divides(config: ModelConfig, size: int) -> None:
    """ConfigError, with the numbers, where a model cannot be split among `size` ranks."""
    for what, count, divides in _divisions(config, size):
        if not divides:
            fitting = [
                str(n)
                for n in range(1, config.num_q_heads + 1)
                if all(fits for _, _, fits in _divisions(config, n))
            ]
            raise ConfigError(
                f"engine.tensor_parallel_size: {size} ranks cannot share the model's {count} "
                f"{what} evenly: expected one of {', '.join(fitting)}"
            )


def _divisions(config: ModelConfig, size: int) -> tuple[tuple[str, int, bool], ...]:
    """What must be shared evenly: its name, its count, whether it can be."""
    heads, inner = config.num_kv_heads, config.intermediate_size
    return (
        ("query heads", config.num_q_heads, config.num_q_heads % size == 0),
        # Fewer heads than ranks: each is held by equally many ranks.
        ("key-value heads", heads, heads % size == 0 or size % heads == 0),
        ("inner dimensions of the FFN (intermediate_size)", inner, inner % size == 0),
    )
