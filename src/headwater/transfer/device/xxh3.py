# ruff: noqa: N803  what a kernel is compiled for is in capitals
"""XXH3-64 (seed 0, default secret) in Triton: the pieces from which a kernel digests bytes while it moves them.

A digest of more than 240 bytes goes through eight accumulators, two per *pair* of words (16 bytes), four pairs to a
*stripe* (64 bytes), sixteen stripes to a *block* (1 KiB). Within a block the accumulators are plain sums; only the
scramble between blocks is serial. The last 64 bytes, which may overlap the stripe before them, count once more.

    for each block:   even, odd = absorb(...) summed over its stripes; after a whole block: scramble
    the last stripe:  absorb under a key of its own;   then: finish          up to 240 bytes: short

Tensors of words are uint64. `WORDS` is the table the keys are read from, made once per device by whoever launches.
Not here: which bytes, where they go (`triton_copy.py`), and the digest on the host (`layout/digest.py`).
"""

from collections.abc import Callable
from typing import Any, Final

from headwater.core.errors import NotInstalled

__all__ = [
    "LAST_STRIPE",
    "SCRAMBLE",
    "SHORT",
    "START",
    "WORDS",
    "absorb",
    "finish",
    "interpreted",
    "jit",
    "kernel",
    "scramble",
    "short",
    "tl",
]

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise NotInstalled(f"the copy kernels need {error.name}: pip install 'headwater[cuda]'") from error

jit: Final[Callable[[Callable[..., Any]], Any]] = triton.jit  # typed, so that what it decorates may be


def kernel(variables: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what is launched; it is not compiled anew for other values of `variables`."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=variables)
    return decorate


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET was set when they were defined."""
    return not isinstance(absorb, triton.JITFunction)


_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1: Final = tl.constexpr(0x9E3779B1)
_PRIME64_1: Final = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2: Final = tl.constexpr(0xC2B2AE3D27D4EB4F)
_PRIME64_3: Final = tl.constexpr(0x165667B19E3779F9)
_PRIME_MX1: Final = tl.constexpr(0x165667919E3779F9)
_PRIME_MX2: Final = tl.constexpr(0x9FB21C651E98DF25)
_START: Final = (  # of the accumulators
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
_SECRET_WORDS: Final = len(_SECRET) - 7

# The secret's word at every byte offset, which is its index here; behind them what the accumulators start from.
WORDS: Final = (*(int.from_bytes(_SECRET[at : at + 8], "little") for at in range(_SECRET_WORDS)), *_START)

START: Final = tl.constexpr(_SECRET_WORDS)  # where in WORDS
SCRAMBLE: Final = tl.constexpr(128)
LAST_STRIPE: Final = tl.constexpr(121)
SHORT: Final = tl.constexpr(240)  # the longest that `short` digests
_MERGE: Final = tl.constexpr(11)


@jit
def absorb(even: tl.tensor, odd: tl.tensor, even_key: tl.tensor, odd_key: tl.tensor) -> tl.tuple:
    """What a pair of words adds to its two accumulators: each word's own product, and its neighbour."""
    return odd + _halves(even ^ even_key), even + _halves(odd ^ odd_key)


@jit
def scramble(accumulator: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Mix an accumulator after a block."""
    return (accumulator ^ (accumulator >> 47) ^ key) * _PRIME32_1


@jit
def finish(even: tl.tensor, odd: tl.tensor, length: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Digest of tasks' accumulators, [n, 4] each, and lengths, [n]."""
    at = words + _MERGE + 16 * tl.arange(0, 4)[None, :]
    folded = tl.sum(_fold(even ^ tl.load(at), odd ^ tl.load(at + 8)), axis=1)
    return _avalanche(folded + length.to(tl.uint64) * _PRIME64_1)


@jit
def short(address: tl.tensor, length: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Digest of up to 240 bytes at each address, any alignment; what it says of longer ones means nothing."""
    size = length.to(tl.uint64)
    digest = _up_to_240(address, length, size, words)
    digest = tl.where(length > 16, digest, _up_to_16(address, length, size, words))
    digest = tl.where(length > 8, digest, _up_to_8(address, length, size, words))
    return tl.where(length > 3, digest, _up_to_3(address, length, size, words))


@jit
def _up_to_240(address: tl.tensor, length: tl.tensor, size: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Sixteen mixes of 16 bytes at most.

    Up to 128 bytes: from both ends towards the middle. Above: from the front, the first eight mixed on their own, and
    the last 16 bytes once more.
    """
    mix = tl.arange(0, 16)[None, :]
    whole = length[:, None]
    small = whole <= 128
    inward = mix // 2
    outer = tl.where(mix % 2 == 0, inward * 16, whole - 16 * (inward + 1))
    last = mix == 15
    at = tl.where(small, outer, tl.where(last, whole - 16, mix * 16))
    secret = tl.where(small | (mix < 8), mix * 16, tl.where(last, 119, mix * 16 - 125))
    counts = tl.where(small, inward <= (whole - 1) // 32, last | (mix < whole // 16))
    counts = counts & (whole > 16) & (whole <= SHORT)
    key = words + tl.where(counts, secret, 0)
    low = _read(address[:, None] + at, 8, counts) ^ tl.load(key)
    high = _read(address[:, None] + at + 8, 8, counts) ^ tl.load(key + 8)
    mixed = _fold(low, high)
    nothing = tl.zeros_like(mixed)
    front = tl.sum(tl.where(counts & (small | (mix < 8)), mixed, nothing), axis=1) + size * _PRIME64_1
    back = tl.sum(tl.where(counts & (mix >= 8) & (whole > 128), mixed, nothing), axis=1)
    return _avalanche(tl.where(length > 128, _avalanche(front) + back, front))


@jit
def _up_to_16(address: tl.tensor, length: tl.tensor, size: tl.tensor, words: tl.tensor) -> tl.tensor:
    mask = (length > 8) & (length <= 16)
    low = _read(address, 8, mask) ^ tl.load(words + 24) ^ tl.load(words + 32)
    high = _read(address + length - 8, 8, mask) ^ tl.load(words + 40) ^ tl.load(words + 48)
    swapped = ((low & 0x00FF00FF00FF00FF) << 8) | ((low >> 8) & 0x00FF00FF00FF00FF)
    swapped = ((swapped & 0x0000FFFF0000FFFF) << 16) | ((swapped >> 16) & 0x0000FFFF0000FFFF)
    return _avalanche(size + _rotate(swapped, 32) + high + _fold(low, high))


@jit
def _up_to_8(address: tl.tensor, length: tl.tensor, size: tl.tensor, words: tl.tensor) -> tl.tensor:
    mask = (length > 3) & (length <= 8)
    both = _read(address + length - 4, 4, mask) + (_read(address, 4, mask) << 32)
    digest = both ^ tl.load(words + 8) ^ tl.load(words + 16)
    digest = (digest ^ _rotate(digest, 49) ^ _rotate(digest, 24)) * _PRIME_MX2
    digest = (digest ^ ((digest >> 35) + size)) * _PRIME_MX2
    return digest ^ (digest >> 28)


@jit
def _up_to_3(address: tl.tensor, length: tl.tensor, size: tl.tensor, words: tl.tensor) -> tl.tensor:
    mask = (length > 0) & (length <= 3)
    first, last = _read(address, 1, mask), _read(address + length - 1, 1, mask)
    middle = _read(address + length // 2, 1, mask)
    secret = tl.load(words)
    digest = ((first << 16) | (middle << 24) | last | (size << 8)) ^ ((secret ^ (secret >> 32)) & 0xFFFFFFFF)
    digest = (digest ^ (digest >> 33)) * _PRIME64_2
    digest = (digest ^ (digest >> 29)) * _PRIME64_3
    return digest ^ (digest >> 32)


@jit
def _read(address: tl.tensor, COUNT: tl.constexpr, mask: tl.tensor) -> tl.tensor:
    """A little-endian number of COUNT bytes at any address."""
    at = address.to(tl.pointer_type(tl.uint8))
    number = tl.load(at, mask=mask, other=0).to(tl.uint64)
    for byte in tl.static_range(1, COUNT):
        number |= tl.load(at + byte, mask=mask, other=0).to(tl.uint64) << (8 * byte)
    return number


@jit
def _halves(word: tl.tensor) -> tl.tensor:
    """The lower half times the upper."""
    return (word & 0xFFFFFFFF) * (word >> 32)


@jit
def _fold(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Both halves of the 128-bit product, one over the other."""
    return (left * right) ^ tl.umulhi(left, right)


@jit
def _avalanche(digest: tl.tensor) -> tl.tensor:
    digest = (digest ^ (digest >> 37)) * _PRIME_MX1
    return digest ^ (digest >> 32)


@jit
def _rotate(word: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    return (word << COUNT) | (word >> (64 - COUNT))
