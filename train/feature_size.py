"""How many bytes a feature store will take, from a conversation's tokens alone. docs/training.md shows the formula."""

import math

BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
TOKEN_BYTES = 4  # the target's greedy token, int32
SCALE_BYTES = 1  # one power of two for each stored vector of H values, fp8 only
# Names, shapes and offsets of one conversation's tensors in the shard's header, a little more or less with the numbers' digits.
HEADER_BYTES = {"fp8": 505, "bf16": 295, "fp32": 295}


def feature_bytes(hidden: int, tokens: int, predicted: int, conversations: int, dtype: str) -> int:
    """`tokens` up to each conversation's last answer, `predicted` of them in front of a trained token.

    Three auxiliary vectors for every token; the final one and the greedy token for the predicted ones.
    """
    vector = hidden * BYTES[dtype] + (SCALE_BYTES if dtype == "fp8" else 0)
    return tokens * 3 * vector + predicted * (vector + TOKEN_BYTES) + conversations * HEADER_BYTES[dtype]


def bytes_per_token(hidden: int, predicted_share: float, dtype: str) -> float:
    """The same without file headers, for one token."""
    return feature_bytes(hidden, 1_000_000, round(1_000_000 * predicted_share), 0, dtype) / 1_000_000


def describe_bytes(count: float) -> str:
    """12.3 MB: powers of ten, as disks are sold."""
    power = min(int(math.log10(max(count, 1)) // 3), 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
