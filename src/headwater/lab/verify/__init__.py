"""`headwater verify`: proofs on whole engines: what is cached (`cases`), or what two share (`pd`), equals one alone."""

from headwater.lab.verify.cases import BLOCK_TOKENS, FAMILIES, Case, run

__all__ = ["BLOCK_TOKENS", "FAMILIES", "Case", "run"]
