"""How rows of blocks are cut into slices on their way to a pool, and back."""

from dataclasses import dataclass

from headwater.config.checks import require_count, require_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """How rows of blocks are cut into slices on their way to a pool, and back. `write_config` reads variables."""

    slice_blocks: int = 500
    slice_timeout_s: float = 10.0  # or what is left of the total
    total_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_count("slice_blocks", self.slice_blocks, 1)
        require_seconds("slice_timeout_s", self.slice_timeout_s)
        require_seconds("total_timeout_s", self.total_timeout_s)
