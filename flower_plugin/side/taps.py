"""Which blocks of a backbone are tapped."""

from flower_plugin.errors import ConfigError


def plan_taps(spec: str, num_blocks: int) -> tuple[int, ...]:
    """Choose the tapped blocks.

    Parameters
    ----------
    spec : str
        A number of taps, evenly spaced (more than there are blocks: all of them), or block indices joined by
        commas.
    num_blocks : int
        Blocks of the backbone.

    Returns
    -------
    tuple of int
        Ascending block indices; the last block is always among them, since the side network adds to it.

    Raises
    ------
    ConfigError
        The backbone has no such block.
    """
    indices = [int(part) for part in spec.split(",")]
    if len(indices) == 1 and "," not in spec:
        return evenly_spaced(min(indices[0], num_blocks), num_blocks)
    wrong = [index for index in indices if not 0 <= index < num_blocks]
    if wrong:
        raise ConfigError(f"'taps' = {spec!r}: the backbone has blocks 0 to {num_blocks - 1}, not {wrong}")
    return tuple(sorted({*indices, num_blocks - 1}))


def evenly_spaced(count: int, num_blocks: int) -> tuple[int, ...]:
    """``count`` block indices at even intervals, ending with the last block (1 <= count <= num_blocks)."""
    return tuple(-(-(place + 1) * num_blocks // count) - 1 for place in range(count))
